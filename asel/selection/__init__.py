"""The selector: walks the tiers, shares tunes, closes cleanly."""
