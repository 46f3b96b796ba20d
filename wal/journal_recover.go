package wal

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/ring"
)

// journalRecovery tells what recoverJournal found.
type journalRecovery struct {
	// Created tells that there was no journal, or one that no round was ever written to.
	Created bool
	// Oldest is the first round that was delivered or, where there was none above the durable point, the one that would
	// have been; Last is the newest round before the START round of this start, 0 in a new journal.
	Oldest, Last RoundNumber
	// Epoch is the epoch of the round Last.
	Epoch Epoch
	// Rounds and Bytes count what was delivered.
	Rounds int
	Bytes  int64
	// Torn is nil where the journal ended cleanly, otherwise what was found behind Last: an append that never became
	// durable.
	Torn error
	// Suspect is nil, or says what is missing at the journal's end although it was durable once.
	Suspect error
	// MarkLost tells that the mark file was missing or unreadable in both slots; it was written anew.
	MarkLost bool
}

// replay says what recoverJournal does with the rounds that it finds.
type replay struct {
	// from is the newest round that is durable elsewhere with everything it says, as Trim was told: 0 where nothing was.
	from RoundNumber
	// round takes every round above from, borrowed.
	round func(*Round) error
	// committed, if set, returns the newest round taken that is committed; otherwise all are.
	committed func() RoundNumber
	// suspect, if set, lets the journal be opened although its end is missing: it is called with the reason before
	// anything is written, and its own error ends the recovery.
	suspect func(error) error
}

var (
	errFileShort   = errors.New("the file is shorter than its header says")
	errNoRounds    = errors.New("no round can be read, though rounds were durable")
	errRoundDiffer = errors.New("the round contradicts the mark file")
	errClosed      = errors.New("the journal is closed")
	// errRoundOld is no damage: a recycled file still holds what it was used for before.
	errRoundOld = errors.New("left over from the file's earlier use")
)

// lostError is the cause of a CorruptionError where rounds are missing that are known to have been durable.
type lostError struct {
	// known is the newest round known durable, and source what says so.
	known  RoundNumber
	source string
	// found is what is in the place of the first missing round.
	found error
}

func (e *lostError) Error() string {
	return fmt.Sprintf("rounds up to %d were durable, as %s says, but this one can't be read: %v", e.known, e.source, e.found)
}

func (e *lostError) Unwrap() error { return e.found }

// recoverJournal opens the journal in opts.Dir, or makes it where there is none, and delivers each round above p.from, in
// order; whoever takes a round may Retain it, and an error of his ends the recovery. START rounds are delivered too.
//
// The journal must hold the round after p.from (or that must be the next one to be written); with from 0 it starts at the
// oldest round it has, which journalRecovery.Oldest names: where that isn't 1, the caller must have lost the point and
// judge by its own means whether what it has elsewhere reaches that far.
//
// The end of the journal is where the chain of rounds ends. It is a torn tail, and cut, unless the first round that is
// missing is known to have been durable: by from, by the mark file, or by a later round that is still there and was
// written after it was flushed. That is corruption, and the journal isn't opened unless p.suspect allows it. When
// recoverJournal returns, all that it delivered is durable, and so is the START round of a new epoch behind it.
func recoverJournal(disk Waiter, opts JournalOptions, p replay) (*Journal, *journalRecovery, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, nil, err
	}
	rc := &recoverer{
		opts: opts, disk: disk, io: newBlockingDisk(disk), replay: p,
		j: &Journal{opts: opts, disk: disk, mark: markWriter{fd: -1, path: markPath(opts.Dir)}},
	}
	if opts.Stamped {
		rc.j.stampRoom = stampLen
	}
	rc.rd = &roundReader{io: rc.io, pool: opts.Pool, journal: opts.ID}
	err = rc.recover()
	rc.rd.close()
	if err != nil {
		rc.abandon()
		return nil, nil, fmt.Errorf("recover journal %d: %w", opts.ID, err)
	}
	return rc.j, &rc.result, nil
}

// tail is the end of the chain so far: the last good round, and where the next one would be.
type tail struct {
	number RoundNumber
	sum    uint64
	nonce  uint64
	epoch  Epoch
	file   *journalFile
	off    int64
}

// recoverer is one recovery.
type recoverer struct {
	opts JournalOptions
	disk Waiter
	io   *blockingDisk
	rd   *roundReader
	replay

	j      *Journal
	result journalRecovery
	// files are all files, by number; firsts has the first round of those that start with one.
	files  []*journalFile
	firsts map[*journalFile]roundHeader
	// chain holds the files that the walk went through, in order.
	chain []*journalFile
	mark  mark
	tail  tail
}

func (rc *recoverer) recover() error {
	if err := rc.openFiles(); err != nil {
		return err
	}
	if err := rc.openMark(); err != nil {
		return err
	}
	if err := rc.readFirsts(); err != nil {
		return err
	}
	if err := rc.findStart(); err != nil {
		return err
	}
	rc.rd.ahead = readWindow
	bad, err := rc.walk()
	if err != nil {
		return err
	}
	if err := rc.judge(bad); err != nil {
		return err
	}
	return rc.openEpoch()
}

// openFiles makes the directory where it is missing, removes what an unfinished preparation left and opens all files.
func (rc *recoverer) openFiles() error {
	if err := makeDir(rc.io, rc.opts.Dir); err != nil {
		return err
	}
	op, err := rc.io.run(ring.Op{Kind: ring.ReadDir, Path: rc.opts.Dir})
	if err != nil {
		return err
	}
	for _, name := range op.Names {
		path := filepath.Join(rc.opts.Dir, name)
		if base, tmp := strings.CutSuffix(name, tmpSuffix); tmp {
			if _, ours := parseJournalFileName(base); ours || base == markName {
				if _, err := rc.io.run(ring.Op{Kind: ring.Remove, Path: path}); err != nil {
					return err
				}
			}
			continue
		}
		number, ok := parseJournalFileName(name)
		if !ok {
			continue
		}
		f, err := rc.openFile(path, number)
		if err != nil {
			return err
		}
		rc.files = append(rc.files, f)
		rc.j.adopt(f)
	}
	return nil
}

func (rc *recoverer) openFile(path string, number uint32) (*journalFile, error) {
	op, err := rc.io.run(ring.Op{Kind: ring.Open, Path: path, Flags: ring.Direct})
	if err != nil {
		return nil, err
	}
	fd := op.FD
	f, err := rc.readFileHeader(path, fd, number)
	if err != nil {
		_, _ = rc.io.run(ring.Op{Kind: ring.Close, FD: fd})
		return nil, err
	}
	f.fd = fd
	return f, nil
}

func (rc *recoverer) readFileHeader(path string, fd int, number uint32) (*journalFile, error) {
	slab := rc.opts.Pool.Get(fileHeaderLen)
	if slab == nil {
		return nil, ErrNoMemory
	}
	defer slab.Release()
	b := slab.Bytes()[:fileHeaderLen]
	op, err := rc.io.run(ring.Op{Kind: ring.Read, FD: fd, Buf: b})
	if err != nil {
		return nil, err
	}
	if op.N < fileHeaderLen {
		return nil, &CorruptionError{Path: path, Offset: int64(op.N), Cause: errFileShort}
	}
	f, err := decodeFileHeader(path, b, rc.opts.ID, number)
	if err != nil {
		return nil, err
	}
	op, err = rc.io.run(ring.Op{Kind: ring.Stat, FD: fd})
	if err != nil {
		return nil, err
	}
	if op.Size < f.size {
		return nil, &CorruptionError{Path: path, Offset: op.Size, Cause: errFileShort}
	}
	return f, nil
}

// readFirsts reads the first round of every file.
func (rc *recoverer) readFirsts() error {
	rc.firsts = make(map[*journalFile]roundHeader, len(rc.files))
	for _, f := range rc.files {
		v, err := rc.rd.at(f, fileHeaderLen)
		if err != nil {
			return err
		}
		if v.bad == nil {
			rc.firsts[f] = v.roundHeader
		}
	}
	return nil
}

// findStart picks the file to start reading in: the one with the round after from. First rounds of files ascend with
// their chain, since whatever doesn't belong to it was wiped before that chain went on (see wipe).
func (rc *recoverer) findStart() error {
	var start, oldest *journalFile
	for _, f := range rc.files {
		h, ok := rc.firsts[f]
		if !ok {
			continue
		}
		if oldest == nil || h.number < rc.firsts[oldest].number {
			oldest = f
		}
		if h.number <= rc.from+1 && (start == nil || h.number > rc.firsts[start].number) {
			start = f
		}
	}
	switch {
	case start != nil:
	case oldest != nil && rc.from == 0:
		start = oldest
	case oldest != nil:
		return &CorruptionError{Path: oldest.path, Offset: fileHeaderLen, Round: rc.from + 1, Cause: fmt.Errorf(
			"rounds up to %d are in the segments, but the journal's oldest is %d", rc.from, rc.firsts[oldest].number)}
	case rc.from > 0:
		return &CorruptionError{Path: rc.opts.Dir, Round: rc.from, Cause: errNoRounds}
	default:
		// No round anywhere: a new journal, unless judge finds a sign of one.
		if len(rc.files) > 0 {
			rc.tail = tail{file: rc.files[0], off: fileHeaderLen}
			rc.chain = append(rc.chain, rc.files[0])
		}
		return nil
	}
	h := rc.firsts[start]
	rc.tail = tail{number: h.number - 1, sum: h.prev, file: start, off: fileHeaderLen}
	rc.chain = append(rc.chain, start)
	rc.result.Oldest = max(h.number, rc.from+1)
	return nil
}

// walk follows the chain and delivers its rounds. It returns why the chain ends.
func (rc *recoverer) walk() (bad error, err error) {
	if rc.tail.file == nil {
		return nil, nil
	}
	for {
		t := &rc.tail
		v, err := rc.rd.at(t.file, t.off)
		if err != nil {
			return nil, err
		}
		if v.bad == nil {
			v.bad = t.follows(&v.roundHeader)
		}
		if v.bad != nil {
			next := rc.nextFile()
			if next == nil {
				return v.bad, nil
			}
			t.file.last = t.number
			t.file, t.off = next, fileHeaderLen
			rc.chain = append(rc.chain, next)
			continue
		}
		if err := rc.accept(&v); err != nil {
			return nil, err
		}
	}
}

// follows returns nil where h continues the chain.
func (t *tail) follows(h *roundHeader) error {
	switch {
	case h.number <= t.number:
		return fmt.Errorf("%w: round %d is in the place of round %d", errRoundOld, h.number, t.number+1)
	case h.number != t.number+1:
		return fmt.Errorf("round %d is in the place of round %d", h.number, t.number+1)
	case mutant.Is("chain-ignored"):
		return nil
	case h.prev != t.sum:
		return errors.New("the round doesn't chain to the one before")
	case t.epoch == 0:
		// The first round that is read; what it continues was trimmed or never was.
		return nil
	case h.start && h.epoch <= t.epoch, !h.start && (h.epoch != t.epoch || h.nonce != t.nonce):
		return errors.New("the round is of another start than the one before")
	}
	return nil
}

// nextFile returns the file whose first round continues the chain.
func (rc *recoverer) nextFile() *journalFile {
	for _, f := range rc.files {
		if h, ok := rc.firsts[f]; ok && f != rc.tail.file && rc.tail.follows(&h) == nil {
			return f
		}
	}
	return nil
}

// accept delivers the round and moves the tail behind it.
func (rc *recoverer) accept(v *found) error {
	t := &rc.tail
	corrupt := func(cause error) error {
		return &CorruptionError{Path: t.file.path, Offset: t.off, Round: v.number, Cause: cause}
	}
	if v.number == rc.mark.round && v.epoch == rc.mark.epoch && v.nonce == rc.mark.nonce && v.sum != rc.mark.sum {
		return corrupt(errRoundDiffer)
	}
	if v.number > rc.from {
		r, err := rc.rd.load(&rc.j.rounds, v)
		if err != nil {
			return corrupt(err)
		}
		err = rc.round(r)
		r.Release()
		if err != nil {
			return err
		}
		rc.result.Rounds++
		rc.result.Bytes += int64(blockAlign(v.size))
	}
	t.number, t.sum, t.nonce, t.epoch = v.number, v.sum, v.nonce, v.epoch
	t.off += int64(blockAlign(v.size))
	return nil
}

// judge decides whether the chain's end is a torn tail (nil) or corruption.
func (rc *recoverer) judge(bad error) error {
	t := &rc.tail
	if bad == nil {
		bad = fs.ErrNotExist
	}
	lost := func(known RoundNumber, source string) error {
		e := &CorruptionError{
			Path: rc.opts.Dir, Round: t.number + 1, Cause: &lostError{known: known, source: source, found: bad},
		}
		if t.file != nil {
			e.Path, e.Offset = t.file.path, t.off
		}
		return rc.openSuspect(e)
	}
	if t.number < rc.from {
		return lost(rc.from, "the checkpoint table")
	}
	if rc.mark.round > t.number && rc.mark.epoch >= t.epoch {
		return lost(rc.mark.round, "the mark file")
	}
	for _, f := range rc.files {
		off := int64(fileHeaderLen)
		if f == t.file {
			off = t.off
		} else if h, ok := rc.firsts[f]; ok && h.number <= t.number {
			// Every use of a file starts at its first round: there is nothing newer behind an old one.
			continue
		}
		proof, err := rc.scan(f, off)
		if err != nil {
			return err
		}
		if proof != nil {
			return lost(proof.flushed, fmt.Sprintf("round %d in %s", proof.number, f.path))
		}
	}
	rc.result.Last, rc.result.Epoch = t.number, t.epoch
	rc.result.Created = t.number == 0
	if t.file != nil && !errors.Is(bad, errRoundMarker) && !errors.Is(bad, errRoundShort) && !errors.Is(bad, errRoundOld) {
		rc.result.Torn = &CorruptionError{Path: t.file.path, Offset: t.off, Round: t.number + 1, Cause: bad}
	}
	return nil
}

// scan looks for a round from off on that was written when the round after the tail was already durable. Rounds of
// earlier epochs prove nothing: they are what a start before this one has cut.
func (rc *recoverer) scan(f *journalFile, off int64) (*roundHeader, error) {
	t := &rc.tail
	for off+ring.BlockSize <= f.size {
		v, err := rc.rd.at(f, off)
		if err != nil {
			return nil, err
		}
		if v.bad != nil {
			off += ring.BlockSize
			continue
		}
		if v.flushed > t.number && (v.epoch > t.epoch || v.epoch == t.epoch && v.nonce == t.nonce) {
			return &v.roundHeader, nil
		}
		off += int64(blockAlign(v.size))
	}
	return nil, nil
}

// openSuspect lets the journal go on although rounds are missing at its end that were durable once, if the caller allows
// it. The epoch of this start must be above that of everything that is left: it would pass for what comes next otherwise.
// Where even rounds below the checkpoint are missing, the journal goes on behind the checkpoint, in a file of its own.
func (rc *recoverer) openSuspect(cause error) error {
	if rc.suspect == nil {
		return cause
	}
	if err := rc.suspect(cause); err != nil {
		return err
	}
	t := &rc.tail
	epoch, err := rc.newestEpoch()
	if err != nil {
		return err
	}
	t.epoch = max(t.epoch, epoch, rc.mark.epoch)
	if t.number < rc.from {
		for _, f := range rc.chain {
			f.last = rc.from
		}
		if len(rc.chain) == len(rc.files) {
			if err := rc.makeFile(); err != nil {
				return err
			}
		}
		i := slices.IndexFunc(rc.files, func(f *journalFile) bool { return !slices.Contains(rc.chain, f) })
		t.number, t.sum, t.file, t.off = rc.from, 0, rc.files[i], fileHeaderLen
		rc.chain = append(rc.chain, t.file)
	}
	rc.result.Last, rc.result.Epoch, rc.result.Suspect = t.number, t.epoch, cause
	return nil
}

// newestEpoch returns the highest epoch of all rounds that can be read.
func (rc *recoverer) newestEpoch() (Epoch, error) {
	newest := Epoch(0)
	for _, f := range rc.files {
		for off := int64(fileHeaderLen); off+ring.BlockSize <= f.size; {
			v, err := rc.rd.at(f, off)
			if err != nil {
				return 0, err
			}
			if v.bad != nil {
				off += ring.BlockSize
				continue
			}
			newest = max(newest, v.epoch)
			off += int64(blockAlign(v.size))
		}
	}
	return newest, nil
}

// makeDir creates dir with its missing parents and makes all their entries durable.
func makeDir(io *blockingDisk, dir string) error {
	var missing []string
	for p := filepath.Clean(dir); ; p = filepath.Dir(p) {
		_, err := io.run(ring.Op{Kind: ring.Stat, Path: p})
		if err == nil || p == filepath.Dir(p) {
			break
		}
		if !isNotExist(err) {
			return err
		}
		missing = append(missing, p)
	}
	if len(missing) == 0 {
		// It may have been made by a start that ended before its entry was durable.
		_, err := io.run(ring.Op{Kind: ring.SyncDir, Path: filepath.Dir(filepath.Clean(dir))})
		return err
	}
	if _, err := io.run(ring.Op{Kind: ring.Mkdir, Path: dir}); err != nil {
		return err
	}
	for _, p := range slices.Backward(missing) {
		if _, err := io.run(ring.Op{Kind: ring.SyncDir, Path: filepath.Dir(p)}); err != nil {
			return err
		}
	}
	return nil
}

func isNotExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }
