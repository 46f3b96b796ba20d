package crash

import (
	"math/rand/v2"
	"time"
)

// Varied returns a scenario and broker settings that differ from seed to seed: many or few partitions, short or long
// lives, small segments, small journals, both disk backends.
func Varied(seed uint64) (Scenario, map[string]any) {
	rng := rand.New(rand.NewPCG(seed, 1))
	s := DefaultScenario(seed)
	s.Partitions = pick(rng, 1, 2, 5, 17, 64)
	s.Producers = pick(rng, 1, 3, 6)
	s.LoadMax = pick(rng, 60*time.Millisecond, 300*time.Millisecond, time.Second)
	s.FlickerOneIn = pick(rng, 2, 4, 8)
	config := map[string]any{
		"io_backend":                pick(rng, "auto", "auto", "auto", "pread"),
		"journal_max_files":         pick(rng, 2, 3, 4, 8),
		"segment_max_bytes":         pick(rng, 64<<10, 256<<10, 1<<20, 64<<20),
		"metadata_snapshot_records": pick(rng, 1, 16, 8192),
	}
	return s, config
}

func pick[T any](rng *rand.Rand, from ...T) T { return from[rng.IntN(len(from))] }
