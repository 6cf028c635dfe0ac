"""Files that are never half-written, and JSON that always looks the same."""

from fasterqk.files.atomic import write_bytes, write_folder, write_text
from fasterqk.files.canonical import (
    SCHEMA_VERSION,
    canonical_json,
    config_defaults,
    config_fields,
    content_hash,
    plain,
)
from fasterqk.files.tables import csv_text, write_csv

__all__ = [
    "SCHEMA_VERSION",
    "canonical_json",
    "config_defaults",
    "config_fields",
    "content_hash",
    "csv_text",
    "plain",
    "write_bytes",
    "write_csv",
    "write_folder",
    "write_text",
]
