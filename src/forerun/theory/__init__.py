"""How much speculation gains, before anything is run: closed forms, simulation, planning."""
