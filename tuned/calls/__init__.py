"""Calls as users make them: checked, remembered by their properties, launched, differentiated, traced."""
