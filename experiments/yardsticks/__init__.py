"""What the vectorised simulator is measured against; development dependencies only."""
