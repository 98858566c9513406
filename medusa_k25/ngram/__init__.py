"""Predictors that need no training: what followed the last tokens before is drafted again."""
