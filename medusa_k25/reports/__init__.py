"""What people see: report.json, tables, pictures and pages."""
