"""An archive of the workbook for students: scripts/release."""
