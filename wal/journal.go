package wal

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"github.com/mortarmq/mortarmq/ring"
)

const (
	// DefaultFileBytes is the size of a journal file.
	DefaultFileBytes = 64 << 20
	// DefaultMinFiles and DefaultMaxFiles bound the number of a journal's files: made at creation, grown on demand.
	DefaultMinFiles = 2
	DefaultMaxFiles = 8
	// DefaultMaxRoundBytes is the largest round of more than one record.
	DefaultMaxRoundBytes = 1 << 20
	// DefaultMaxInFlight is how many rounds are at the device at once. A second one was measured to gain 10 % at 1 KiB,
	// nothing at 100 B, and to cost latency at low rates.
	DefaultMaxInFlight = 1
	// DefaultInlineRoundBytes is the size up to which a round that is alone is written by the owner's own system call.
	DefaultInlineRoundBytes = 64 << 10
	// DefaultZeroBytesPerSec paces the zeroing of further files beside the commits.
	DefaultZeroBytesPerSec = 100 << 20

	// MaxJournalFiles and MaxRoundsInFlight bound the options.
	MaxJournalFiles   = 1024
	MaxRoundsInFlight = 64

	// maxRoundLen bounds a round in bytes: one record of the largest size, with room for its headers.
	maxRoundLen = 17 << 20
	// reserveDivisor: the last quarter of the journal is for ledger and metadata.
	reserveDivisor = 4
)

// Never is the time that a state machine's Step returns when nothing but a completion or a call will give it work.
const Never = time.Duration(math.MaxInt64)

// ErrRecordTooLarge means that a record fits no round of this journal, whatever is trimmed: its key or value is beyond the
// format's limits, or the configured file size is too small for it.
var ErrRecordTooLarge = errors.New("record is larger than the format or a journal file allows")

// JournalOptions configures a journal. Zero values mean the defaults.
type JournalOptions struct {
	// Dir is the journal's directory, created with its parents where it is missing.
	Dir string
	// ID is the journal's number, from 0; every round carries it.
	ID int
	// FileBytes is the size in bytes of new files, a multiple of ring.BlockSize. Existing files keep theirs.
	FileBytes int64
	// MinFiles files are made at creation; on demand they become up to MaxFiles.
	MinFiles, MaxFiles int
	// MaxRoundBytes bounds a round in bytes, a multiple of ring.BlockSize; a record that is larger by itself makes a
	// larger round.
	MaxRoundBytes int
	// MaxInFlight is how many rounds may be at the device at once.
	MaxInFlight int
	// InlineRoundBytes is the size up to which a round that is alone at the device is written inside the disk's next Poll
	// or Wait (ring.Op.Inline); negative: never.
	InlineRoundBytes int
	// ZeroBytesPerSec paces the preparation of further files.
	ZeroBytesPerSec int64
	// Stamped makes the journal a replicated log: every round ends with its position, see Stamp and AppendPayload.
	Stamped bool
	// Pool provides the rounds' memory.
	Pool *ring.Pool
	// Logger gets what an operator should know; nil means slog.Default().
	Logger *slog.Logger
	// Random draws the keys of files and the random number of each start; nil means the system's generator. The
	// simulator sets it.
	Random func() uint64
}

// withDefaults returns o with its zero values replaced, or every problem with it.
func (o JournalOptions) withDefaults() (JournalOptions, error) {
	setDefault(&o.FileBytes, DefaultFileBytes)
	setDefault(&o.MinFiles, DefaultMinFiles)
	setDefault(&o.MaxFiles, max(DefaultMaxFiles, o.MinFiles))
	setDefault(&o.MaxRoundBytes, DefaultMaxRoundBytes)
	setDefault(&o.MaxInFlight, DefaultMaxInFlight)
	setDefault(&o.InlineRoundBytes, DefaultInlineRoundBytes)
	setDefault(&o.ZeroBytesPerSec, DefaultZeroBytesPerSec)
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Random == nil {
		o.Random = systemRandom
	}
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("journal: "+format, args...)) }
	if o.Dir == "" {
		bad("no directory given")
	}
	if o.Pool == nil {
		bad("no buffer pool given")
	}
	if o.ID < 0 || o.ID > math.MaxUint16 {
		bad("id %d is not between 0 and %d", o.ID, math.MaxUint16)
	}
	if o.MaxRoundBytes < ring.BlockSize || o.MaxRoundBytes > maxRoundLen || o.MaxRoundBytes%ring.BlockSize != 0 {
		bad("round size of %d bytes is not a multiple of %d up to %d", o.MaxRoundBytes, ring.BlockSize, maxRoundLen)
	}
	if o.FileBytes < int64(o.MaxRoundBytes)+fileHeaderLen || o.FileBytes%ring.BlockSize != 0 || o.FileBytes > maxFileBytes {
		bad("file size of %d bytes is not a multiple of %d between %d (one round) and %d",
			o.FileBytes, ring.BlockSize, o.MaxRoundBytes+fileHeaderLen, int64(maxFileBytes))
	}
	if o.MinFiles < 2 || o.MaxFiles < o.MinFiles || o.MaxFiles > MaxJournalFiles {
		bad("%d to %d files: at least 2 are needed (one is written while the other is trimmed), at most %d",
			o.MinFiles, o.MaxFiles, MaxJournalFiles)
	}
	if o.MaxInFlight < 1 || o.MaxInFlight > MaxRoundsInFlight {
		bad("%d rounds in flight is not between 1 and %d", o.MaxInFlight, MaxRoundsInFlight)
	}
	return o, errors.Join(errs...)
}

func setDefault[T int | int64](v *T, def T) {
	if *v == 0 {
		*v = def
	}
}

// Journal is a shard's commit log: what is appended to it is durable once its round is flushed. All methods must be
// called on the goroutine that owns the journal and its disk; completions arrive inside that disk's Poll.
//
// A caller appends records until it wants them durable (or gets ErrRoundFull), then seals the round, and goes on
// appending to the next one while the first is at the device. OnFlushed's function hears of every sealed round, in
// order, exactly once.
type Journal struct {
	opts   JournalOptions
	disk   Disk
	rounds roundPool

	epoch     Epoch
	nonce     uint64
	next      RoundNumber
	lastSum   uint64
	flushed   RoundNumber
	committed RoundNumber
	trimmed   RoundNumber
	onFlushed func(*Round, error)

	// gather is the open round, nil while nothing is gathered; arena is the slab it is cut from, used up to arenaOff.
	gather   *Round
	arena    *ring.Slab
	arenaOff int

	// stampRoom is what every round keeps free for its position: stampLen, or 0 on a node on its own.
	stampRoom int

	// flight holds the rounds at the device, oldest first.
	flight []*Round
	// broken: a round could not be made durable, so none after it counts.
	broken bool
	err    error

	// cur is being written at curOff. full holds what was written before, oldest first, free what can be written
	// next, in that order.
	cur        *journalFile
	curOff     int64
	full, free []*journalFile
	freeBytes  int64
	capacity   int64

	// lastFile is the highest number that a file has.
	lastFile uint32

	mark markWriter
	grow grower
}

// fail makes the first error sticky.
func (j *Journal) fail(op, path string, err error) {
	if j.err != nil {
		return
	}
	j.err = &FailedError{Op: op, Path: path, Err: err}
	j.opts.Logger.Error("journal failed; nothing more is acknowledged", "journal", j.opts.ID, "error", j.err)
}

// Err returns the sticky error, a *FailedError, or nil.
func (j *Journal) Err() error { return j.err }

// SetDisk makes the journal use another disk from now on: recovery runs on a disk that can be waited for, the shard then
// takes the journal over on its own. Nothing may be in flight.
func (j *Journal) SetDisk(d Disk) { j.disk = d }

// OnFlushed sets the function that hears of every sealed round, inside the disk's Poll, in the order of their numbers:
// with err nil once the round and all before it are durable, otherwise with the journal's sticky error, which all later
// rounds get too. f gets a reference and must Release the round. It may call the journal's methods.
func (j *Journal) OnFlushed(f func(r *Round, err error)) { j.onFlushed = f }

// Epoch returns the epoch that this start opened.
func (j *Journal) Epoch() Epoch { return j.epoch }

// Flushed returns the number of the newest durable round.
func (j *Journal) Flushed() RoundNumber { return j.flushed }

// SetCommitted tells the journal how far rounds are committed; later rounds carry it in their headers. It never goes
// back.
func (j *Journal) SetCommitted(n RoundNumber) { j.committed = max(j.committed, min(n, j.flushed)) }

// NextRound returns the number that the gathering round will get.
func (j *Journal) NextRound() RoundNumber { return j.next }

// InFlight returns how many rounds are at the device.
func (j *Journal) InFlight() int { return len(j.flight) }

// Gathered returns how many records and bytes (headers included) the gathering round has.
func (j *Journal) Gathered() (records, bytes int) {
	if j.gather == nil {
		return 0, 0
	}
	return j.gather.records, j.gather.size
}

// CanSeal tells whether Seal would send a round: something is gathered, the device takes another round, nothing failed.
func (j *Journal) CanSeal() bool {
	return j.gather != nil && len(j.flight) < j.opts.MaxInFlight && j.err == nil
}

// Idle tells that no operation of the journal is at the disk.
func (j *Journal) Idle() bool { return len(j.flight) == 0 && !j.mark.busy && !j.grow.busy() }

// Usage returns the bytes that rounds occupy and the bytes that the journal's prepared files hold together. Files that
// are trimmed count as free; the file that is being written is used as far as it is written.
func (j *Journal) Usage() (used, capacity int64) {
	return j.capacity - j.freeBytes - (j.cur.size - j.curOff), j.capacity
}
