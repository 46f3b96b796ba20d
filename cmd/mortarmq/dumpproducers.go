package main

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// producerWindow is what a dedup snapshot says about one producer of a partition.
type producerWindow struct {
	Topic, Partition uint16
	ProducerID       uint64
	// Runs are consecutive producer_seqs that were stored at consecutive sequences, oldest first.
	Runs []producerRun
}

type producerRun struct{ ProducerSeq, Sequence, Count uint64 }

// Layout of the engine's snapshot of producer windows: a version byte, then windows (topic u16, partition u16, producer u64,
// number of runs u32) each followed by its runs (producer_seq u64, sequence u64, count u64), all big-endian.
const (
	windowsVersion  = 1
	windowHeaderLen = 16
	windowRunLen    = 24
)

// walkProducerWindows decodes the data of a dedup snapshot. w is valid until visit returns.
func walkProducerWindows(data []byte, visit func(w *producerWindow) error) error {
	if len(data) == 0 || data[0] != windowsVersion {
		return fmt.Errorf("the producer windows have an unknown version, this program knows %d", windowsVersion)
	}
	data = data[1:]
	var w producerWindow
	for len(data) > 0 {
		if len(data) < windowHeaderLen {
			return errors.New("the data ends inside the header of a producer's window")
		}
		w.Topic, w.Partition = binary.BigEndian.Uint16(data), binary.BigEndian.Uint16(data[2:])
		w.ProducerID = binary.BigEndian.Uint64(data[4:])
		n := uint64(binary.BigEndian.Uint32(data[12:]))
		data = data[windowHeaderLen:]
		if n*windowRunLen > uint64(len(data)) {
			return fmt.Errorf("producer %d of topic %d partition %d: %d runs do not fit the data", w.ProducerID, w.Topic, w.Partition, n)
		}
		w.Runs = w.Runs[:0]
		for range n {
			w.Runs = append(w.Runs, producerRun{binary.BigEndian.Uint64(data), binary.BigEndian.Uint64(data[8:]), binary.BigEndian.Uint64(data[16:])})
			data = data[windowRunLen:]
		}
		if err := visit(&w); err != nil {
			return err
		}
	}
	return nil
}
