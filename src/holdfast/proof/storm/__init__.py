"""The storm: a load that double-texts, interrupts, disconnects and kills, and records what every participant saw."""
