// Package dedupsnap is the content of a snapshot of the producers' windows (the data of an MMDD file; the file around it
// carries the checksum). It is written and read by package engine, and read by the command line's dump.
//
//	 0      1
//	+------+--------------------------------------------+----
//	|ver   |window                                      |window ...
//	|u8 = 1|                                            |
//	+------+--------------------------------------------+----
//
//	window:
//	 0       2           4            12         16
//	+-------+-----------+------------+----------+-------------------------------------+----
//	|topic  |partition  |producer_id |runs n    |producer_seq u64, sequence u64,      |
//	|u16    |u16        |u64         |u32, >= 1 |count u64, >= 1                      | n times
//	+-------+-----------+------------+----------+-------------------------------------+----
//
// All numbers are big-endian. A run says that producer_seq and the count-1 ones behind it were stored at sequence and those
// behind it; a window's runs go on from one another, oldest first. Windows come least recently used first.
package dedupsnap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

const (
	version   = 1
	windowLen = 16
	runLen    = 24
)

// Window is what a snapshot says about one producer of a partition.
type Window struct {
	Topic, Partition uint16
	ProducerID       uint64
	// Runs are consecutive producer_seqs, oldest first; at least one.
	Runs []Run
}

// Run says that the producer_seqs ProducerSeq to Last were stored at consecutive sequences from Sequence on.
type Run struct{ ProducerSeq, Sequence, Count uint64 }

// Last returns the run's last producer_seq.
func (r Run) Last() uint64 { return r.ProducerSeq + r.Count - 1 }

// Append begins a snapshot; AppendWindow adds to it.
func Append(dst []byte) []byte { return append(dst, version) }

// AppendWindow appends a window, which is borrowed.
func AppendWindow(dst []byte, w *Window) []byte {
	dst = binary.BigEndian.AppendUint16(dst, w.Topic)
	dst = binary.BigEndian.AppendUint16(dst, w.Partition)
	dst = binary.BigEndian.AppendUint64(dst, w.ProducerID)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(w.Runs)))
	for _, r := range w.Runs {
		dst = binary.BigEndian.AppendUint64(dst, r.ProducerSeq)
		dst = binary.BigEndian.AppendUint64(dst, r.Sequence)
		dst = binary.BigEndian.AppendUint64(dst, r.Count)
	}
	return dst
}

// Decode hands the windows of a snapshot to visit, in order; a window is valid until visit returns. It refuses what Append
// and AppendWindow can't have written, after the windows before it, and passes an error of visit on.
func Decode(data []byte, visit func(w *Window) error) error {
	if len(data) == 0 {
		return errors.New("producer windows: the snapshot is empty")
	}
	if data[0] != version {
		return fmt.Errorf("producer windows: the snapshot has version %d, this build knows %d", data[0], version)
	}
	data = data[1:]
	var w Window
	for len(data) > 0 {
		if len(data) < windowLen {
			return errors.New("producer windows: the snapshot ends inside a window's header")
		}
		w.Topic, w.Partition = binary.BigEndian.Uint16(data), binary.BigEndian.Uint16(data[2:])
		w.ProducerID = binary.BigEndian.Uint64(data[4:])
		n := uint64(binary.BigEndian.Uint32(data[12:]))
		data = data[windowLen:]
		if n == 0 || n > uint64(len(data))/runLen {
			return fmt.Errorf("producer windows: %d runs of %v don't fit the snapshot", n, &w)
		}
		w.Runs = w.Runs[:0]
		for range n {
			r := Run{binary.BigEndian.Uint64(data), binary.BigEndian.Uint64(data[8:]), binary.BigEndian.Uint64(data[16:])}
			if !r.follows(w.Runs) {
				return fmt.Errorf("producer windows: the runs of %v don't go on from one another", &w)
			}
			w.Runs = append(w.Runs, r)
			data = data[runLen:]
		}
		if err := visit(&w); err != nil {
			return err
		}
	}
	return nil
}

// follows tells whether a run may come behind others.
func (r Run) follows(runs []Run) bool {
	if r.ProducerSeq == 0 || r.Sequence == 0 || r.Count == 0 || r.Count > math.MaxUint64-max(r.ProducerSeq, r.Sequence) {
		return false
	}
	return len(runs) == 0 || r.ProducerSeq == runs[len(runs)-1].Last()+1
}

// String names the window's producer.
func (w *Window) String() string {
	return fmt.Sprintf("producer %d of topic %d partition %d", w.ProducerID, w.Topic, w.Partition)
}
