"""The checkout: its files, its tiers, its public names and its builds."""
