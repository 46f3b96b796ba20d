// Package sim runs whole clusters in simulated time: three nodes with the real engine, journals, stores, ledger, metadata and
// replication, on simulated disks and a simulated network, with clients that publish and consume, all on one goroutine and
// from one seed. A run that fails prints its seed, and the same seed gives the same run again.
//
// # The faults
//
// Network: messages of the control lane are lost, duplicated and reordered, all lanes delayed, connections broken, nodes cut
// off from each other in both directions or in one. Processes: they are killed, and stopped for a while. Disks: power is cut,
// which keeps any part of what was not flushed; flushes fail, take long or hang; sectors rot, on one node at a time; space
// runs out. Clocks: the wall clock of a node jumps.
//
// # The checks
//
// In the first phase, under faults, safety: a sequence of a partition is acknowledged for one message only, a message for one
// sequence only, and what is delivered is what was published. In the second the faults end; within a bound the cluster serves
// again, all publishes settle, and whichever node leads, every partition holds every acknowledged message at its sequence,
// each message at most once, without gaps, and the same on all nodes.
package sim
