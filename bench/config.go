package bench

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Config says what to measure. Start from DefaultConfig.
type Config struct {
	// Mortard is the broker's binary.
	Mortard string
	// Dir is the directory under which data directories are made; it decides which device is measured.
	Dir string
	// Out is the directory for results, profiles and broker logs.
	Out string
	// Workloads are names of Workloads, Sizes value sizes in bytes.
	Workloads []string
	Sizes     []int
	// Rounds is how often the whole list of cases is gone through.
	Rounds int
	// Duration is the length of runs that are measured by time, Warmup that of the uncounted part before each run.
	Duration time.Duration
	Warmup   time.Duration
	// JournalFileBytes and JournalMaxFiles are given to the broker and make the journal's capacity; a publish run sends
	// JournalMultiple times that in records.
	JournalFileBytes int64
	JournalMaxFiles  int
	JournalMultiple  float64
	// Rate is that of the end-to-end runs in messages per second.
	Rate float64
	// CatchupMessages of 1 KiB are read back by the catch-up runs.
	CatchupMessages int
	// RestartBytes are stored before the restart run's restarts.
	RestartBytes int64
	// Broker are further configuration keys for mortard.
	Broker map[string]any
	// Profile fetches profiles of the broker during each run.
	Profile bool

	// limitFileBytes is the size of the file that the disk limits are measured on: by default that of a journal file.
	limitFileBytes int64
}

// Workloads are the names that Config.Workloads may hold, in the order in which they run.
var Workloads = []string{"raw", "publish", "publish-sync", "producers", "partitions", "end-to-end", "end-to-end-max", "catchup", "restart"}

// DefaultConfig returns the full run: about a quarter of an hour per round on a two-core machine.
func DefaultConfig() Config {
	return Config{
		Dir:              ".",
		Workloads:        slices.Clone(Workloads),
		Sizes:            []int{100, 1 << 10, 16 << 10},
		Rounds:           3,
		Duration:         10 * time.Second,
		Warmup:           time.Second,
		JournalFileBytes: 64 << 20,
		JournalMaxFiles:  8,
		JournalMultiple:  4,
		Rate:             5000,
		CatchupMessages:  1_000_000,
		RestartBytes:     10 << 30,
		Broker:           map[string]any{},
		limitFileBytes:   64 << 20,
	}
}

// Quick shortens the run to about a minute: the figures show that everything works, not how well.
func (c *Config) Quick() {
	c.Rounds = 1
	c.Duration = time.Second
	c.Warmup = 200 * time.Millisecond
	c.JournalFileBytes = 16 << 20
	c.JournalMaxFiles = 4
	c.JournalMultiple = 1
	c.CatchupMessages = 50_000
	c.RestartBytes = 64 << 20
}

// Validate reports everything that is wrong.
func (c *Config) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.Mortard != "", "no mortard binary given")
	check(c.Rounds >= 1, "rounds is %d: use 1 or more", c.Rounds)
	check(c.Duration > 0, "duration is %v: use more than 0", c.Duration)
	check(c.Warmup >= 0, "warmup is %v: use 0 or more", c.Warmup)
	check(c.Rate > 0, "rate is %v: use more than 0", c.Rate)
	check(c.JournalMultiple > 0, "journal-multiple is %v: use more than 0", c.JournalMultiple)
	check(c.JournalFileBytes > 0 && c.JournalMaxFiles > 0, "the journal's size is %d files of %d bytes: use more than 0", c.JournalMaxFiles, c.JournalFileBytes)
	check(c.CatchupMessages > 0, "catchup-messages is %d: use 1 or more", c.CatchupMessages)
	check(c.RestartBytes > 0, "restart-bytes is %d: use more than 0", c.RestartBytes)
	check(len(c.Workloads) > 0 && len(c.Sizes) > 0, "no workloads or no sizes given")
	for _, w := range c.Workloads {
		check(slices.Contains(Workloads, w), "unknown workload %q: use some of %s", w, strings.Join(Workloads, ","))
	}
	for _, s := range c.Sizes {
		check(s >= stampBytes && s <= maxValueBytes, "a size is %d: use %d to %d", s, stampBytes, maxValueBytes)
	}
	return errors.Join(errs...)
}

// maxValueBytes bounds the value size: a window of frames is kept in memory.
const maxValueBytes = 1 << 20

// journalBytes returns the capacity of the broker's journal.
func (c *Config) journalBytes() int64 { return c.JournalFileBytes * int64(c.JournalMaxFiles) }

// messagesFor returns how many messages of a size fill JournalMultiple journals with records.
func (c *Config) messagesFor(size int) uint64 {
	const recordHeader = 56
	return uint64(c.JournalMultiple*float64(c.journalBytes())/float64(recordHeader+size)) + 1
}
