"""What people look at: figures, tables and one page."""
