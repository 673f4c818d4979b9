"""Other frameworks' trainers on zagent's rollouts. Nothing here imports a framework before it is used."""
