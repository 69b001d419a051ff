"""How the plan that serves is changed, alone or with those of other indexes."""
