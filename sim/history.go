package sim

import (
	"cmp"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// What clients saw of a partition must be what a single log would have shown them: each publish appends at one moment between
// its first sending and its acknowledgement, a delivery shows what was appended before it arrived, and a commit point that was
// told of had been reached. The content of the log at the end says which publish has which sequence; what is left to check is
// that there is an order of all these moments.

// operation is what a client did with a partition.
type operation struct {
	kind operationKind
	seq  uint64
}

type operationKind uint8

const (
	appends operationKind = iota // the message at seq is appended
	reaches                      // seq has been appended: it was delivered, or is within a commit point
)

// partitionModel is a log: its state is the last sequence.
var partitionModel = porcupine.Model{
	Init: func() any { return uint64(0) },
	Step: func(state, input, _ any) (bool, any) {
		last, op := state.(uint64), input.(operation)
		if op.kind == appends {
			return op.seq == last+1, op.seq
		}
		return op.seq <= last, last
	},
}

// linearizable checks the history of each partition, whose content is log, at the end of a run.
func (s *scenario) linearizable(log map[place][2]uint64) {
	w, r := s.w, s.r
	end := int64(w.now) + 1
	histories := map[uint16][]porcupine.Operation{}
	add := func(p place, op operation, from, to int64) {
		histories[p.partition] = append(histories[p.partition], porcupine.Operation{ClientId: int(op.kind), Input: op, Call: from, Return: to})
	}
	answered := map[place]time.Duration{}
	commits := map[uint16]uint64{}
	for _, a := range r.acks {
		if _, ok := answered[a.place]; !ok {
			answered[a.place] = a.at
		}
		if a.commit > commits[a.partition] {
			commits[a.partition] = a.commit
			add(a.place, operation{reaches, a.commit}, int64(r.first[r.who[a.place]]), int64(a.at))
		}
	}
	for _, p := range sortedPlaces(log) {
		to := end
		if at, ok := answered[p]; ok {
			to = int64(at)
		}
		add(p, operation{appends, p.seq}, int64(r.first[log[p]]), to)
		if d, ok := r.reads[p]; ok {
			add(p, operation{reaches, p.seq}, int64(d.sent), int64(d.at))
		}
	}
	for part := range uint16(partitions) {
		if !porcupine.CheckOperations(partitionModel, histories[part]) {
			w.fail("what clients saw of partition %d is not what a log would have shown them", part)
		}
	}
}

func sortedPlaces[V any](m map[place]V) []place {
	list := make([]place, 0, len(m))
	for p := range m {
		list = append(list, p)
	}
	slices.SortFunc(list, comparePlaces)
	return list
}

func comparePlaces(a, b place) int {
	return cmp.Or(cmp.Compare(a.topic, b.topic), cmp.Compare(a.partition, b.partition), cmp.Compare(a.seq, b.seq))
}
