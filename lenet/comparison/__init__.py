"""How rows of vision runs are laid beside each other: tables, figures, and what the reports gave."""
