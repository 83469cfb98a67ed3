"""Spans in files of OTLP JSON lines: `asel demo` writes one, a collector's file exporter writes them too."""
