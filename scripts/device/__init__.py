"""What scripts/device-check runs on a machine with a GPU. It knows Python's standard library only, and nothing of the
repository: scripts/device-pack packs this folder with the programs that it runs.

`check` is the program: its parts in order, within the time given. `folder` has the packed things, `machine` says what they
run on. `tensors` and `models` make models of random weights on the spot. Parts: `conformance`, `routing`, `rows`, `speeds`
(overhead, prompts, the cache against whole layers), `copies`. `report` prints the table and writes the files."""
