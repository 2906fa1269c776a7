"""From a spec and a size to a variant: tables, records, the portfolio, the nearest row, the default."""
