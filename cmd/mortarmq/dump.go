package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/mortarmq/mortarmq/wal"
)

// dumpOptions are the flags of dump.
type dumpOptions struct {
	check    bool
	maxValue int
}

func (a *app) dumpCommand() *cobra.Command {
	var o dumpOptions
	c := &cobra.Command{
		Use:   "dump FILE...|DIR",
		Short: "Print what is in the files of a data directory, and what is wrong with them",
		Long: `Print the content of segments, indexes, checkpoints, journals, marks, ledgers, the metadata log and snapshots, record by
record, without a broker. Of a directory every file of it is printed.

A line has the offset in the file, what is there and its fields; with --json it is an object. Damage is reported with
offset and reason, what lies behind it is printed where that is possible, and the exit code is 1. A file that a running
broker is writing may look torn at its end. Nothing is ever written.`,
		Example: `  mortarmq dump data/topics/1/0
  mortarmq dump --check data
  mortarmq dump --json data/metadata | jq 'select(.type == "record")'`,
		Args: cobra.MinimumNArgs(1),
	}
	c.Flags().BoolVar(&o.check, "check", false, "print damage only")
	c.Flags().IntVar(&o.maxValue, "max-value", 64, "print at most this many bytes of keys and values; -1 prints all")
	c.RunE = does(func(ctx context.Context, args []string) error {
		return a.dump(ctx, &o, args)
	})
	return c
}

func (a *app) dump(ctx context.Context, o *dumpOptions, paths []string) error {
	d := &dumper{o: o, json: a.json, out: bufio.NewWriterSize(a.stdout, 64<<10)}
	err := d.paths(ctx, paths)
	if flushErr := d.out.Flush(); err == nil && flushErr != nil {
		err = outputError(flushErr)
	}
	if err == nil && d.damaged > 0 {
		err = fmt.Errorf("%d of %d files are damaged", d.damaged, d.files)
	}
	return err
}

// dumper prints files.
type dumper struct {
	o    *dumpOptions
	json bool
	out  *bufio.Writer

	files, damaged int
	// path is the file being printed; wrong tells that damage was found in it, foreign that it need not be a broker's.
	path    string
	wrong   bool
	foreign bool
}

func (d *dumper) paths(ctx context.Context, paths []string) error {
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return usagef("%w", err)
		}
		if !info.IsDir() {
			if err := d.file(ctx, path, false); err != nil {
				return err
			}
			continue
		}
		err = filepath.WalkDir(path, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.Type().IsRegular() {
				return err
			}
			return d.file(ctx, path, true)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// file prints one file. inside tells one that was found in a directory: then it may be something else altogether.
func (d *dumper) file(ctx context.Context, path string, inside bool) error {
	d.path, d.wrong, d.foreign = path, false, inside
	d.files++
	err := wal.Inspect(path, func(f wal.Finding) error {
		if err := ctx.Err(); err != nil {
			return errInterrupted
		}
		return d.finding(f)
	})
	if d.wrong {
		d.damaged++
	}
	return err
}

// finding prints one thing.
func (d *dumper) finding(f wal.Finding) error {
	switch f := f.(type) {
	case *wal.LogFound:
		return d.print(0, logType(f.Stream.Kind), stream(f.Stream).with("journal", f.Journal, "base_sequence", f.Base, "created", unixMs(f.CreatedMs)))
	case *wal.RecordFound:
		return d.record(f)
	case *wal.PaddingFound:
		return d.print(f.Offset, "padding", fieldList{}.with("length", f.Length))
	case *wal.IndexFound:
		return d.index(f)
	case *wal.CheckpointFound:
		return d.print(0, "checkpoint", fieldList{}.with("next_sequence", f.Next, "durable_offset", f.Offset))
	case *wal.TableFound:
		return d.table(f)
	case *wal.MarkFound:
		return d.print(f.Offset, "mark", fieldList{}.with("slot", f.Slot, "journal", f.Journal, "generation", f.Generation,
			"epoch", f.Epoch, "round", f.Round, "sum", hex64(f.Sum)))
	case *wal.ReplicaFound:
		return d.replica(f)
	case *wal.CatchupFound:
		return d.catchup(f)
	case *wal.SnapshotFound:
		return d.snapshot(f)
	case *wal.JournalFound:
		return d.print(0, "journal", fieldList{}.with("journal", f.Journal, "number", f.Number, "bytes", f.FileBytes))
	case *wal.RoundFound:
		return d.round(f)
	case *wal.UnusedFound:
		what := "leftover" // of rounds from before the file was used again
		if f.Zero {
			what = "zeros"
		}
		return d.print(f.Offset, what, fieldList{}.with("length", f.Length))
	case *wal.Damage:
		return d.damage(f)
	}
	return nil
}

func (d *dumper) damage(f *wal.Damage) error {
	if d.foreign && errors.Is(f.Err, wal.ErrUnknownFormat) {
		return d.print(0, "other", fieldList{}.with("bytes", f.Length))
	}
	d.wrong = true
	fields := fieldList{}
	reason := f.Err
	if corrupt := (*wal.CorruptionError)(nil); errors.As(f.Err, &corrupt) {
		if corrupt.Stream.Kind != 0 {
			fields = stream(corrupt.Stream)
		}
		if corrupt.Sequence != 0 {
			fields = fields.with("sequence", corrupt.Sequence)
		}
		if corrupt.Round != 0 {
			fields = fields.with("round", corrupt.Round)
		}
		reason = corrupt.Cause
	}
	if f.Length > 0 {
		fields = fields.with("skipped_bytes", f.Length)
	}
	return d.line(f.Offset, "damage", fields.with("reason", reason.Error()))
}

// bad reports that a whole record or snapshot has a content that can't be read.
func (d *dumper) bad(offset int64, err error) error {
	d.wrong = true
	return d.line(offset, "damage", fieldList{}.with("reason", err.Error()))
}

func (d *dumper) index(f *wal.IndexFound) error {
	known := 0
	for _, s := range f.Sums {
		if s != 0 {
			known++
		}
	}
	fields := stream(f.Stream).with("base_sequence", f.Base, "covered", f.Covered, "entries", len(f.Entries), "sums", known, "blocks", len(f.Sums))
	if err := d.print(0, "index", fields); err != nil {
		return err
	}
	for _, e := range f.Entries {
		err := d.print(int64(e.Offset), "entry", fieldList{}.with("sequence", e.Sequence, "time", unixMs(e.TimestampMs), "length", e.Length))
		if err != nil {
			return err
		}
	}
	return nil
}

func (d *dumper) table(f *wal.TableFound) error {
	fields := fieldList{}.with("slot", f.Slot, "current", f.Current, "journal", f.Journal, "generation", f.Generation,
		"epoch", f.Epoch, "round", f.Round, "commit", f.Commit)
	if f.Log.Index > 0 {
		fields = fields.with("log_index", f.Log.Index, "log_epoch", f.Log.Epoch)
	}
	err := d.print(f.Offset, "table", fields.with("rows", len(f.Rows)))
	if err != nil || !f.Current {
		return err
	}
	for _, r := range f.Rows {
		err := d.print(f.Offset, "row", stream(r.Stream).with("next_sequence", r.Next, "base_sequence", r.Base, "durable_offset", r.Offset))
		if err != nil {
			return err
		}
	}
	for _, b := range f.Begins {
		if err := d.print(f.Offset, "begin", stream(b.Stream).with("first_sequence", b.First)); err != nil {
			return err
		}
	}
	return nil
}

func (d *dumper) round(f *wal.RoundFound) error {
	what := "round"
	switch {
	case f.Stale:
		what = "old_round"
	case f.Start:
		what = "start_round"
	}
	fields := fieldList{}.with("round", f.Number, "epoch", f.Epoch, "length", f.Length, "flushed", f.Flushed,
		"committed", f.Committed, "entries", len(f.Entries), "records", f.Records)
	if p := f.Position; p != nil {
		fields = fields.with("log_index", p.Point.Index, "log_epoch", p.Point.Epoch, "log_prev_epoch", p.Prev, "log_commit", p.Commit)
		if p.Flags&wal.OpeningRound != 0 {
			fields = fields.with("opening", true)
		}
		if p.Flags&wal.CatchupRound != 0 {
			fields = fields.with("catchup", true)
		}
	}
	return d.print(f.Offset, what, fields)
}

func (d *dumper) record(f *wal.RecordFound) error {
	if d.o.check && f.Stream.Kind == wal.Messages {
		return nil // whole, and its value is the producer's
	}
	r := f.Record
	fields := stream(f.Stream).with("sequence", r.Sequence, "epoch", r.LeaderEpoch, "time", unixMs(r.TimestampMs))
	if r.ProducerID != 0 || r.ProducerSeq != 0 {
		fields = fields.with("producer_id", r.ProducerID, "producer_seq", r.ProducerSeq)
	}
	if r.Flags&wal.FlagRedriven != 0 {
		fields = fields.with("redriven", true)
	}
	if r.Flags&wal.FlagTombstone != 0 {
		fields = fields.with("tombstone", true)
	}
	if r.ReplFlags != 0 {
		fields = fields.with("replication_flags", r.ReplFlags)
	}
	switch f.Stream.Kind {
	case wal.Ledger:
		return d.ledgerRecord(f, fields)
	case wal.Metadata:
		return d.metadataRecord(f, fields)
	case wal.Messages, wal.Replica:
	}
	if len(r.Key) > 0 {
		fields = fields.with("key", d.clip(r.Key))
	}
	return d.print(f.Offset, "record", fields.with("value_bytes", len(r.Value), "value", d.clip(r.Value)))
}

func (d *dumper) replica(f *wal.ReplicaFound) error {
	s := &f.State
	return d.print(f.Offset, "node_state", fieldList{}.with("slot", f.Slot, "generation", f.Generation, "node", s.Node,
		"cluster", fmt.Sprintf("%x", s.Cluster), "logs", s.Logs, "promised_epoch", s.Promised, "candidate", s.Candidate,
		"forming", s.Forming, "learner", s.Learner, "suspect", s.Suspect))
}

func (d *dumper) catchup(f *wal.CatchupFound) error {
	s := &f.State
	return d.print(f.Offset, "catchup", fieldList{}.with("slot", f.Slot, "generation", f.Generation, "leader", s.Leader, "epoch", s.Epoch,
		"from_index", s.From.Index, "from_epoch", s.From.Epoch, "target_index", s.Target.Index, "target_epoch", s.Target.Epoch,
		"begun", unixMs(s.BegunMs), "streams", s.Streams, "streams_done", s.StreamsDone, "records", s.Records, "bytes", s.Bytes,
		"metadata", s.Metadata, "cursors", s.Cursors, "windows", s.Windows))
}

// clip is what of a key or value is printed.
func (d *dumper) clip(b []byte) payload {
	if d.o.maxValue >= 0 && len(b) > d.o.maxValue {
		return payload{b[:d.o.maxValue], true}
	}
	return payload{b, false}
}

// print prints a line, unless only damage is wanted.
func (d *dumper) print(offset int64, what string, fields fieldList) error {
	if d.o.check {
		return nil
	}
	return d.line(offset, what, fields)
}

func (d *dumper) line(offset int64, what string, fields fieldList) error {
	all := slices.Concat(fieldList{{"file", d.path}, {"offset", offset}, {"type", what}}, fields)
	if d.json {
		return all.writeJSON(d.out)
	}
	return all.writeText(d.out)
}

func logType(k wal.StreamKind) string {
	switch k {
	case wal.Ledger:
		return "ledger"
	case wal.Metadata:
		return "metadata_log"
	case wal.Messages, wal.Replica:
	}
	return "segment"
}

// stream is how a line names its stream.
func stream(id wal.StreamID) fieldList {
	switch id.Kind {
	case wal.Ledger:
		return fieldList{{"stream", "ledger"}}
	case wal.Metadata:
		return fieldList{{"stream", "metadata"}}
	case wal.Replica:
		return fieldList{{"stream", "position"}}
	case wal.Messages:
	}
	return fieldList{{"topic_id", id.Topic}, {"partition", id.Partition}}
}

func unixMs(ms uint64) string {
	if ms > maxUnixMs {
		return fmt.Sprintf("%d ms", ms)
	}
	return time.UnixMilli(int64(ms)).UTC().Format("2006-01-02T15:04:05.000Z")
}

// maxUnixMs is the end of the year 9999, the last one that RFC 3339 can write.
const maxUnixMs = 253402300799999

func hex64(v uint64) string { return fmt.Sprintf("%016x", v) }
