"""What the simulator is measured against; development dependencies only."""
