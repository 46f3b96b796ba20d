// Package metadata is the fold over the metadata mutation log: topics, groups, members, assignments and leaders.
//
// It is pure: no I/O, no clock, no goroutine, no lock, no randomness. The one writer (the leader) checks a change against
// the State (CheckCreateTopic and friends), proposes it as a Mutation, and applies it when the log has committed it; every
// replica and every recovery applies the same mutations in the same order and arrives at the same State, byte for byte in
// its snapshot.
//
// # Mutation, version 1
//
// All integers are big-endian; str is a u16 length and that many bytes.
//
//	u8 version (1) | u8 type | fields
//
//	1 topic created    topic u16, partitions u16, name str, settings str (canonical JSON)
//	2 topic deleted    topic u16
//	3 group created    group u16, topic u16, start policy u8, name str, settings str (canonical JSON)
//	4 group deleted    group u16
//	5 member joined    group u16, member u64, membership epoch u32
//	6 member left      group u16, member u64, membership epoch u32
//	7 assigned         group u16, membership epoch u32, assignment epoch u32, count u32,
//	                   count x (partition u16, member u64, ownership epoch u64)
//	8 leader changed   node u16
//	9 group changed    group u16, settings str (canonical JSON)
//
// mutation_id and leader_epoch are not in the mutation: they are the sequence and the leader_epoch of the record that
// carries it. Decoding is strict: what it accepts re-encodes to the same bytes.
package metadata
