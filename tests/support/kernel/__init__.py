"""The kernel and its limits: huge pages, cgroups, locks, failing calls."""
