"""Pictures of what was measured and pages that show what was kept."""
