package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/mortarmq/mortarmq/ring"
)

// The state of a node of a cluster (MMRS, replica.mmrs in the data directory) is a slot file, see slotfile.go:
//
//	0  "MMRS"                               16  16 bytes, the cluster's id, zeros while there is none
//	4  u8 format version 1                  32  u32 promised epoch
//	5  u8 flags: 1 forming, 2 learner,      36  u16 candidate, the node that it was promised to
//	   4 suspect                            38  u16 number of logs
//	6  u16 node id                          40  80 zero bytes
//	8  u64 generation                      120  u64 checksum
const (
	replicaStateFile = "replica.mmrs"

	stateForming = 1 << 0
	stateLearner = 1 << 1
	stateSuspect = 1 << 2
)

var replicaFormat = stateFormat{magic: "MMRS", version: 1}

// ReplicaState is what a node of a cluster must not forget. The zero value is that of a node that has never been in one.
type ReplicaState struct {
	// Cluster is the id of the cluster, zero while the node belongs to none.
	Cluster [16]byte
	// Node is the node's own id; a data directory belongs to one node.
	Node uint16
	// Logs is the number of logs of the cluster.
	Logs uint16
	// Promised is the highest epoch that was promised or followed, Candidate the node that it was promised to, or 0.
	Promised  Epoch
	Candidate uint16
	// Forming says that Cluster may not be known to all its nodes yet.
	Forming bool
	// Learner says that the node may have forgotten promises or flushed rounds, or is giving rounds up to catch up.
	Learner bool
	// Suspect says that rounds that the node vouched for may be missing at the end of its logs, see OpenOptions.Suspect.
	Suspect bool
}

var (
	errStateValue = errors.New("the state is impossible")
	errStateLost  = errors.New("what this node has promised isn't known: move the data directory aside, so that the node " +
		"joins its cluster anew")
)

func (s *ReplicaState) encode(b *[stateUsed]byte) {
	*b = [stateUsed]byte{}
	for _, f := range [...]struct {
		set bool
		bit byte
	}{{s.Forming, stateForming}, {s.Learner, stateLearner}, {s.Suspect, stateSuspect}} {
		if f.set {
			b[5] |= f.bit
		}
	}
	binary.BigEndian.PutUint16(b[6:], s.Node)
	copy(b[16:32], s.Cluster[:])
	binary.BigEndian.PutUint32(b[32:], uint32(s.Promised))
	binary.BigEndian.PutUint16(b[36:], s.Candidate)
	binary.BigEndian.PutUint16(b[38:], s.Logs)
}

// decodeReplicaState reads the state from a whole slot.
func decodeReplicaState(b []byte) (s ReplicaState, err error) {
	s = ReplicaState{
		Cluster: [16]byte(b[16:32]), Node: binary.BigEndian.Uint16(b[6:]), Logs: binary.BigEndian.Uint16(b[38:]),
		Promised: Epoch(binary.BigEndian.Uint32(b[32:])), Candidate: binary.BigEndian.Uint16(b[36:]),
		Forming: b[5]&stateForming != 0, Learner: b[5]&stateLearner != 0, Suspect: b[5]&stateSuspect != 0,
	}
	if b[5]&^(stateForming|stateLearner|stateSuspect) != 0 || !allZero(b[40:stateSumOffset]) || s.Node == 0 {
		return s, &CorruptionError{Cause: errStateValue}
	}
	return s, nil
}

// ReplicaFile keeps a node's ReplicaState. All methods belong to the goroutine that owns its disk; saves complete inside
// that disk's Poll.
type ReplicaFile struct {
	f     *slotFile
	state ReplicaState
}

// OpenReplicaFile opens the state file in the data directory dir, or makes both where they are missing; then the state is
// zero but for the node's id. pool provides 8 KiB until Close.
//
// A file whose two slots are both damaged is a *CorruptionError: the node's promises are lost, and it must not go on as if it
// had made none. A state of another node is an error, too.
func OpenReplicaFile(w Waiter, pool *ring.Pool, dir string, node uint16) (*ReplicaFile, error) {
	if node == 0 {
		return nil, errors.New("a node's id is at least 1")
	}
	if err := makeDir(newBlockingDisk(w), dir); err != nil {
		return nil, err
	}
	var initial [stateUsed]byte
	(&ReplicaState{Node: node}).encode(&initial)
	path := filepath.Join(dir, replicaStateFile)
	f, err := openSlotFile(w, pool, path, replicaFormat, initial[:])
	if err != nil {
		if errors.Is(err, errStateSlots) {
			err = fmt.Errorf("%w; %w", err, errStateLost)
		}
		return nil, fmt.Errorf("open the node's state: %w", err)
	}
	state, err := decodeReplicaState(f.current[:])
	if err == nil && state.Node != node {
		err = fmt.Errorf("it belongs to node %d, this is node %d: a data directory can't be handed to another node", state.Node, node)
	}
	if err != nil {
		return nil, errors.Join(wrapFile(path, nil, err), f.close(w))
	}
	return &ReplicaFile{f: f, state: state}, nil
}

// State returns the state that was saved last, whether or not it is durable yet.
func (r *ReplicaFile) State() ReplicaState { return r.state }

// SetDisk makes the file use another disk from now on. Nothing may be in flight.
func (r *ReplicaFile) SetDisk(d Disk) { r.f.disk = d }

// Save makes a state durable; done, which may be nil, hears when it is, inside the disk's Poll, or with the sticky
// *FailedError, possibly at once. States are saved in order; one that waits behind another is replaced by the next, whose
// durability stands for its own. The node's id stays what it is.
func (r *ReplicaFile) Save(s ReplicaState, done func(error)) {
	s.Node = r.state.Node
	r.state = s
	var b [stateUsed]byte
	s.encode(&b)
	r.f.save(&b, done)
}

// SaveWait is Save that waits for the state to be durable, driving w, which must be the file's disk.
func (r *ReplicaFile) SaveWait(w Waiter, s ReplicaState) error {
	s.Node = r.state.Node
	r.state = s
	var b [stateUsed]byte
	s.encode(&b)
	return r.f.wait(w, &b)
}

// Err returns the sticky error, a *FailedError, or nil. After it nothing is promised any more: what the file says isn't
// known before it is opened again.
func (r *ReplicaFile) Err() error { return r.f.err }

// Idle tells that no operation of the file is at the disk.
func (r *ReplicaFile) Idle() bool { return !r.f.busy }

// Close waits for what is being saved, driving w, and closes the file.
func (r *ReplicaFile) Close(w Waiter) error { return r.f.close(w) }
