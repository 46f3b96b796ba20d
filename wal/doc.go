// Package wal keeps records on disk: a commit journal, where they become durable, and behind it the files where they stay
// (segments of partitions, the delivery ledger, the metadata log), with recovery over both. It holds any log; what the
// records mean is not its business. It starts no goroutine and reads no clock: the disk is an interface that operations
// are submitted to, and everything that happens beside the commits is a state machine that its owner steps.
//
// # The journal
//
// A journal belongs to one shard and takes the records of all its streams. Records are gathered into a round, and a round
// goes to the device as one write that is durable when it completes, however many streams it touches. The journal's files
// are made ahead, allocated and written with zeros, so that a round's write changes nothing but data blocks, and are used
// again when the rounds in them have moved on. All integers are big-endian. A file, journal-<number>.mmj:
//
//	 0                4096
//	+----------------+---------+-------+---------+--------------------+
//	| header, zeros  | round n | n+1   | n+2     | stale bytes, zeros |
//	+----------------+---------+-------+---------+--------------------+
//	                 each round starts on a 4096-byte boundary, none spans two files
//
//	file header                              entry header (24 bytes)
//	 0  "MMJL"                                0  u8  stream kind: 1 messages, 2 ledger, 3 metadata,
//	 4  u8  format version 1                         4 log position (position.go)
//	 5  u8  0                                 1  u8  0
//	 6  u16 journal id                        2  u16 topic id, 4 u16 partition; 0 but for messages
//	 8  u32 file number                       6  u16 0
//	12  u32 0                                 8  u32 number of records
//	16  u64 file size                        12  u32 their length in bytes
//	24  u64 the file's key, random           16  u64 sequence of the first
//	32  u64 0                                24  records back to back, numbered without gaps
//	40  u64 xxhash64 of bytes 0 to 40
//
//	round header (80 bytes), then the entries, then zeros up to the next boundary
//	 0  u32 marker 4D524E44 ("MRND")
//	 4  u8  type: 1 data, 2 START; u8 0
//	 6  u16 journal id
//	 8  u32 length in bytes of header and entries
//	12  u32 number of entries
//	16  u64 round number
//	24  u64 checksum: xxhash64 of header and entries with the file's key in this field
//	32  u64 checksum of the round before
//	40  u64 random number of this start
//	48  u32 leader epoch; u32 0
//	56  u64 newest round known durable when this one was encoded
//	64  u64 newest round known committed then
//	72  u64 xxhash64 of bytes 0 to 72 with the file's key in the checksum's field
//
// Rounds are numbered from 1 without gaps, across files and restarts, and each carries the checksum of the one before: that
// chain, not the position, says what belongs to the journal. A START round has no entries; each start of the process
// writes one before anything else, with an epoch and a random number of its own, and it names what it follows by its
// number and the checksum before. The file's key is known to nobody who sends values, so that no value can hold bytes that
// pass for a round.
//
// A START round after a tail that was cut takes the number of the first round that was cut; what lies behind it on the
// disk neither chains to it nor carries its random number.
//
// The mark file, mark, says how far the journal was durable when it last fell quiet. It has two slots of 4096 bytes, which
// are written in turn, the generation's lowest bit choosing:
//
//	 0  "MMJM"                               24  u64 newest durable round
//	 4  u8 format version 1; u8 0            32  u64 its checksum
//	 6  u16 journal id                       40  u64 random number of the start that wrote it
//	 8  u32 leader epoch; u32 0              48  u64 0
//	16  u64 generation                       56  u64 xxhash64 of bytes 0 to 56
//
// # What recovery takes for granted
//
// A round that was acknowledged is on the device, whole. Where the chain ends is the end of the journal unless something
// says that the next round was durable once: the mark, the header of a later round of this start or a later one, or the
// checkpoint table of the files behind the journal. Then it is corruption, nothing is cut, and the start is refused. A
// file is written again only when its rounds are known to be superfluous by a table that is durable itself, and never the
// file with the newest durable round.
//
// # The journal of a node of a cluster
//
// There a journal is a replicated log. Rounds, numbers and chain are the node's own, as above, but every round ends with a
// position record: its point in the log (index, and the epoch of its leader) and how far the log was committed. A follower
// writes a leader's rounds byte for byte into rounds of its own. What a later leader replaces stays in the journal: a round
// with index i takes the place of those from i on that were written before it. Only what is known to be committed goes to
// the files below and to recovery's Handler; the rest is returned as pending, see gate. Where the end of the journal is
// missing that once was durable, such a node may start without it, once it is on record that its end is suspect.
//
// # The files behind the journal
//
// A Store takes committed rounds and moves their records to files, so that the journal can be trimmed:
//
//	<data>/
//	  journal/<id>/partitions.mmck            MMCK, how far every file is durable       checkpoint.go
//	               dedup.mmdd                 MMDD, the producers' windows              checkpoint.go
//	               catchup.mmcup              MMCUP, how far a catch-up has got         catchupstate.go
//	  replica.mmrs                            MMRS, what a node of a cluster promised   replicastate.go
//	  topics/<topic>/<partition>/
//	               <sequence>.mqs             MMQS, a segment; records from <sequence>  segment.go
//	               <sequence>.mqi             MMIX, its index and block sums            index.go
//	               checkpoint.mqc             MMQC, a lower bound of the table's row    checkpoint.go
//	               quarantine-<time>.json     why the partition isn't served            quarantine.go
//	  topics/.deleted-<topic>-<journal>-<n>   a deleted topic on its way out            store_drop.go
//	  ledger/<id>/ delivery.mql               MMLQ, the newest ledger file              segment.go
//	               delivery-<sequence>.mql    MMLQ, the ones before it
//	               cursor.mqc                 MMCU, what replaces the ledger's start    checkpoint.go
//	  metadata/    mmml-<sequence>.log        MMML, the mutation log                    segment.go
//	               mmms-<position>-<epoch>.bin  MMMS, what replaces its start           checkpoint.go
//	               quarantine/<time>/         metadata that can't be trusted            open_logs.go
//
// The formats are drawn in the files named. Three kinds of statement hold them together. The table says up to which
// record and offset each file is durable, and from which round on the journal is needed; it is written when the files and
// their directory entries are flushed, and the journal is trimmed when it is. So a record is always in a file below the
// table's offset or in a round above the table's, or in both, and whatever a file holds behind that offset, and whatever
// file the table doesn't name, is worth nothing after a crash: it is cut, or written again, from the journal. Snapshots
// say up to which record a log is superfluous; they are complete under their name or not there. Indexes, and the
// partitions' own checkpoints, say nothing that couldn't be found out otherwise.
package wal
