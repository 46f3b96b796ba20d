package sim

import (
	"context"
	"errors"
	"log/slog"

	"github.com/mortarmq/mortarmq/wal"
)

// Situations beside the faults that a run is worth little without, see Required.
const (
	tailAtFailover     = "uncommitted tail at failover"
	oldEpochSent       = "old-epoch round re-replicated"
	tailCut            = "uncommitted tail cut"
	suspectEnd         = "suspect end"
	learner            = "learner"
	duplicateInFlight  = "duplicate before commit"
	forcedRevoke       = "forced REVOKE"
	crashAroundLetter  = "crash around a dead letter"
	deadLetter         = "dead letter"
	journalRecycled    = "recycled journal file"
	snapshotInstalled  = "snapshot install"
	bulkCatchup        = "catch-up in bulk"
	dataSetAside       = "data set aside"
	operatorSetAside   = "data set aside by an operator"
	damagedFiles       = "damaged files made anew"
	duplicateAnswered  = "duplicate recognised"
	metadataQuarantine = "metadata quarantined"
	flushedCompared    = "FLUSHED compared with the disk"
	topicDeleted       = "topic deleted"
	figuresCompared    = "figures of leaders compared"
	visibleCompared    = "visible message looked for on the disks"
)

// situations says which line of a node's log shows what has occurred.
var situations = map[string]string{
	"this log has rounds of earlier epochs that may not be committed":                         tailAtFailover,
	"a round of an earlier epoch is sent again":                                               oldEpochSent,
	"rounds that were never committed are cut off":                                            tailCut,
	"this node's data is damaged: it counts for nothing until it has everything again":        suspectEnd,
	"a publish is sent again while the first one is on its way":                               duplicateInFlight,
	"a journal file is free again":                                                            journalRecycled,
	"a snapshot from the leader takes the place of a log's past":                              snapshotInstalled,
	"this node's log is too far behind: catching up in bulk":                                  bulkCatchup,
	"this node's data can't be trusted: it is set aside, and made again from the other nodes": dataSetAside,
	"files of this node are damaged: they are made again from the leader":                     damagedFiles,
	"the metadata can't be trusted: it is moved away and not served":                          metadataQuarantine,
	letterBegins: deadLetter,
}

// Lines of the log between which a message is on its way to its dead-letter topic.
const (
	letterBegins = "a message moves to its dead-letter topic"
	letterEnds   = "a message is done with its dead letter"
)

// diskFailed is said by a process that has given up.
const diskFailed = "this node's disk failed: it neither leads nor votes until it is restarted"

// storeFailed is also said where a flush fails, but then not of corrupt data.
const storeFailed = "segments can't be written: nothing more is taken until a restart; check the disk"

// damageFound are what a node says only if its disk holds something else than was written to it, or has lost it.
var damageFound = map[string]bool{
	"this node's data is damaged: it counts for nothing until it has everything again":        true,
	"this node's data can't be trusted: it is set aside, and made again from the other nodes": true,
	"files of this node are damaged: they are made again from the leader":                     true,
	"the metadata can't be trusted: it is moved away and not served":                          true,
	"quarantined: its files aren't served until they are repaired":                            true,
	storeFailed: true,
}

// requiredSituations are those of Required.
var requiredSituations = []string{
	tailAtFailover, oldEpochSent, suspectEnd, learner, duplicateInFlight, forcedRevoke, crashAroundLetter, journalRecycled, snapshotInstalled,
}

// observer reads what a node logs.
type observer struct {
	h    *host
	life int
	out  slog.Handler
}

// Enabled implements slog.Handler.
func (o *observer) Enabled(context.Context, slog.Level) bool { return true }

// Handle implements slog.Handler.
func (o *observer) Handle(ctx context.Context, r slog.Record) error {
	h := o.h
	if what := situations[r.Message]; what != "" {
		h.w.count(what)
	}
	if damageFound[r.Message] && !h.victim {
		if cause := causeOf(r); r.Message != storeFailed || errors.Is(cause, wal.ErrCorrupt) {
			h.w.fail("node %d, whose disk keeps what was flushed, says: %s: %v", h.id, r.Message, cause)
		}
	}
	if o.life == h.life {
		switch r.Message {
		case letterBegins:
			h.letters++
			h.letterAt = h.w.now
		case letterEnds:
			h.letters--
		case diskFailed:
			h.broken = true
		}
	}
	if r.Level >= slog.LevelError {
		h.w.note("node %d says: %s", h.id, r.Message)
	}
	if o.out != nil {
		return o.out.Handle(ctx, r)
	}
	return nil
}

// causeOf returns the error that a line of a log tells of, nil if there is none.
func causeOf(r slog.Record) (cause error) {
	r.Attrs(func(a slog.Attr) bool {
		if err, ok := a.Value.Any().(error); ok && a.Key == "err" {
			cause = err
		}
		return true
	})
	return cause
}

// WithAttrs implements slog.Handler.
func (o *observer) WithAttrs(attrs []slog.Attr) slog.Handler {
	if o.out == nil {
		return o
	}
	return &observer{h: o.h, life: o.life, out: o.out.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (o *observer) WithGroup(name string) slog.Handler {
	if o.out == nil {
		return o
	}
	return &observer{h: o.h, life: o.life, out: o.out.WithGroup(name)}
}
