// Package sim runs whole clusters in simulated time: three nodes with the real engine, journals, stores, ledger, metadata and
// replication, on simulated disks and a simulated network, with clients that publish and consume, all on one goroutine and
// from one seed. A run that fails prints its seed, and the same seed gives the same run again.
//
// # The faults
//
// Network: messages of the control lane are lost, duplicated and reordered, all lanes delayed, connections broken, nodes cut
// off from each other in both directions or in one. Processes: they are killed, stopped in order, one after the other, and
// stood still for a while. Disks: power is cut, which keeps any part of what was not flushed; flushes fail, take long or hang;
// space runs out. Of one node in a run, the victim: bits flip at rest, reads return another block or older content, the disk is
// lost. Clocks: the wall clock of a node jumps. Members of groups come, leave, vanish, and don't give up what is taken from
// them; topics are declared, published to and deleted.
//
// # The checks
//
// In the first phase, under faults, safety: a sequence of a partition is acknowledged for one message only, a message for one
// sequence only; what is delivered is what was published; one node leads an epoch; a partition of a group has one owner under
// an ownership epoch; nothing comes again that was acknowledged or rejected; attempts neither decrease nor exceed their maximum;
// no node but the victim finds damage on its disk; what the leaders say of the cluster (mutation id, sequences, what a group is
// done with) never gets less. In some of the runs, and of them for a sample: what a node says that it has flushed is on its disk
// for sure, and what a client hears of on a majority of the disks.
//
// In the second the faults end; within a bound the cluster serves again, all publishes settle and the groups finish. Then every
// partition holds every acknowledged message at its sequence, each message at most once, without gaps, byte for byte the same
// on all nodes and, in some runs, whichever node leads; each message of a group was acknowledged or is in exactly one dead
// letter after exactly as many attempts as allowed; the groups' counters add up; and what clients saw of a partition is
// linearizable.
//
// # What runs go through
//
// Each counts its faults, and situations that matter: nodes log them (observer). RunMany adds them up, and what is in Required
// must occur.
package sim
