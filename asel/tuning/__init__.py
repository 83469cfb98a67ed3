"""Compiles, measures and ranks candidates; knows neither cache nor store."""
