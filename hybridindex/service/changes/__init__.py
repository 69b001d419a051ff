"""How what is served is changed: the plan, alone or with those of other indexes; rows; the generation of a node."""
