"""The records: what was measured, one JSON file a device."""
