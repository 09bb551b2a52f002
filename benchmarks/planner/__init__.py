"""Accuracy of the planner: tables of predictions beside published and measured numbers."""
