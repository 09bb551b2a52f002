"""How well the planner predicts: tables of predicted against published and measured numbers."""
