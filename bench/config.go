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
	// Cache is where bench/peers/install.sh has put the peers' programs.
	Cache string
	// Workloads are names of Workloads. Sizes are the value sizes in bytes of the publish runs, OtherSizes those of the other
	// workloads that have several, ClusterSizes those of the pipelined cluster runs.
	Workloads    []string
	Sizes        []int
	OtherSizes   []int
	ClusterSizes []int
	// Partitions are the partition counts of the partitions runs, Members the group sizes of the end-to-end runs.
	Partitions []int
	Members    []int
	// Peers are measured beside mortard.
	Peers []*Peer
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
	// RestartBytes are stored before the restarts, one run each.
	RestartBytes []int64
	// AbsentBytes are what a follower misses in the absence run.
	AbsentBytes int64
	// MixedDuration is the length of the mixed run.
	MixedDuration time.Duration
	// Broker are further configuration keys for mortard.
	Broker map[string]any
	// Profile fetches profiles of the broker during each run.
	Profile bool

	// profileLoad is how long a run lasts while profiles are taken, 0 for as long as these need.
	profileLoad time.Duration
	// lockPath is locked during a run: LockPath, but for tests.
	lockPath string
	// limitFileBytes is the size of the file that the disk limits are measured on: by default that of a journal file.
	limitFileBytes int64
}

// Workloads are the names that Config.Workloads may hold, in the order in which they run.
var Workloads = []string{"raw", "publish", "publish-sync", "producers", "end-to-end", "end-to-end-max", "catchup", "partitions", "restart", "cluster", "absence", "mixed"}

// slowWorkloads run only where they are asked for by name.
var slowWorkloads = []string{"absence", "mixed"}

// DefaultConfig returns the full run of mortard alone: about a quarter of an hour per round on a two-core machine.
func DefaultConfig() Config {
	return Config{
		Dir:              ".",
		Cache:            "bench/.cache",
		Workloads:        slices.DeleteFunc(slices.Clone(Workloads), func(w string) bool { return slices.Contains(slowWorkloads, w) }),
		Sizes:            []int{100, 1 << 10, 16 << 10},
		OtherSizes:       []int{100, 1 << 10, 16 << 10},
		ClusterSizes:     []int{100, 1 << 10},
		Partitions:       []int{1, 16, 256, 1024, 4096},
		Members:          []int{1, 4},
		Rounds:           5,
		Duration:         10 * time.Second,
		Warmup:           time.Second,
		JournalFileBytes: 64 << 20,
		JournalMaxFiles:  8,
		JournalMultiple:  4,
		Rate:             5000,
		CatchupMessages:  1_000_000,
		RestartBytes:     []int64{1 << 30, 10 << 30},
		AbsentBytes:      10 << 30,
		MixedDuration:    time.Hour,
		Broker:           map[string]any{},
		lockPath:         LockPath,
		limitFileBytes:   64 << 20,
	}
}

// Compare shortens a run so that all peers fit into less than half an hour beside mortard: what is compared is the publish
// run at every size and the other workloads at 1 KiB.
func (c *Config) Compare() {
	c.Workloads = []string{"raw", "publish", "publish-sync", "producers", "end-to-end", "end-to-end-max", "cluster"}
	c.OtherSizes = []int{1 << 10}
	c.Duration = 1500 * time.Millisecond
	c.Warmup = 200 * time.Millisecond
	c.JournalFileBytes = 32 << 20
	c.JournalMaxFiles = 4
	c.CatchupMessages = 250_000
}

// Quick shortens the run to about a minute: the figures show that everything works, not how well.
func (c *Config) Quick() {
	c.Rounds = 1
	c.OtherSizes = []int{1 << 10}
	c.Partitions = []int{1, 256}
	c.Duration = time.Second
	c.Warmup = 200 * time.Millisecond
	c.JournalFileBytes = 16 << 20
	c.JournalMaxFiles = 4
	c.JournalMultiple = 1
	c.CatchupMessages = 50_000
	c.RestartBytes = []int64{64 << 20}
	c.AbsentBytes = 256 << 20
	c.MixedDuration = 15 * time.Second
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
	check(c.AbsentBytes > 0, "absent-bytes is %d: use 1 or more", c.AbsentBytes)
	check(c.MixedDuration > 0, "mixed-duration is %v: use more than 0", c.MixedDuration)
	for _, n := range c.RestartBytes {
		check(n > 0, "restart-bytes has %d: use more than 0", n)
	}
	for _, n := range c.Partitions {
		check(n >= 1 && n <= maxPartitions, "partitions has %d: use 1 to %d", n, maxPartitions)
	}
	for _, n := range c.Members {
		check(n >= 1 && n <= fewPartitions, "members has %d: use 1 to %d, as many as there are partitions", n, fewPartitions)
	}
	check(len(c.Workloads) > 0, "no workloads given")
	for _, w := range c.Workloads {
		check(slices.Contains(Workloads, w), "unknown workload %q: use some of %s", w, strings.Join(Workloads, ","))
	}
	for _, s := range slices.Concat(c.Sizes, c.OtherSizes, c.ClusterSizes) {
		check(s >= stampBytes && s <= maxValueBytes, "a size is %d: use %d to %d", s, stampBytes, maxValueBytes)
	}
	return errors.Join(errs...)
}

// maxPartitions is the most that a topic may have.
const maxPartitions = 65534

// maxValueBytes bounds the value size: a window of frames is kept in memory.
const maxValueBytes = 1 << 20

// profileTime is how long the load must last for startProfiles.
func (c *Config) profileTime() time.Duration {
	if c.profileLoad > 0 {
		return c.profileLoad
	}
	return profileTime(c.Duration)
}

// journalBytes returns the capacity of the broker's journal.
func (c *Config) journalBytes() int64 { return c.JournalFileBytes * int64(c.JournalMaxFiles) }

// messagesFor returns how many messages of a size fill JournalMultiple journals with records.
func (c *Config) messagesFor(size int) uint64 {
	const recordHeader = 56
	return uint64(c.JournalMultiple*float64(c.journalBytes())/float64(recordHeader+size)) + 1
}

// checkPeers reports every peer that is not installed.
func (c *Config) checkPeers() error {
	var errs []error
	for _, p := range c.Peers {
		if err := p.Missing(&PeerOptions{Cache: c.Cache}); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", p.Name, err))
		}
	}
	return errors.Join(errs...)
}
