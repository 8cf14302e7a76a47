"""What is measured between two hosts: `on_hosts` runs a function on their ranks, `collectives` and
`strategies` are what runs there, and `recorded` has the results of a machine that could."""
