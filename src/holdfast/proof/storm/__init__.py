"""The storm: a load of concurrent sends, interrupts, disconnects and kills, and a record of all observations."""
