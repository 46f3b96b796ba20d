// Package peer keeps the nodes of a cluster connected: it makes and accepts their connections, has both ends prove that they
// share a secret, and moves frames (package engine/peerwire) between them.
//
// # Connections
//
// Two nodes have one connection per lane: control, log and bulk. The node with the lower number makes them and makes them
// again, after a pause that doubles and is half random; the other one accepts. Both send on all of them. A connection that
// the lower node makes takes the place of an older one, which it has then given up.
//
// A frame that was queued is written once, or lost with its connection: Handler.Disconnected says so. Nothing is repeated
// here. What replication does about it is its own: rounds are sent again from where the follower's log ends, messages of
// elections are repeated by their timers, catch-ups begin anew.
//
// # Goroutines
//
// One accepts. One per lane and peer makes or awaits the connection and reads it; another one writes it. The writer takes
// everything that waits and writes it with one writev: headers from the queue, payloads from where they lie. A payload that
// was received lies in memory of its own, which is the handler's until it releases it; small frames are taken apart in the
// read buffer. In steady state nothing is allocated for an APPEND or a FLUSHED on either side.
//
// A small frame that finds nothing else waiting is written by the goroutine that sends it, if the socket takes it without
// waiting (direct.go): a lone round need not wait for the writer to wake up, neither as APPEND nor as FLUSHED.
//
// Blocking reads and writes are right here, unlike on the client port: a node has two peers, not thousands of clients.
//
// # Bounds
//
// A queue holds so many bytes (Options.LogQueue, BulkQueue) and frames, and refuses beyond: the sender goes on from its own
// memory when Handler.Writable says that there is room. FLUSHED is never refused: a newer one takes the place of an older one
// of the same log. A lane is read only while the handler has released most of what it was given (Options.Unreleased). The
// kernel takes no more than 256 KiB of a connection that it can't send yet. So a peer that is slow or stopped costs a bounded
// amount of memory, and holds up its own lane only.
//
// # Handshake
//
// In frames of version 0, whose layout no version may change. D is the node that makes the connection, A the one that
// accepts.
//
//	D -> A  HELLO      what D is, the versions that it speaks, a random number
//	A -> D  CHALLENGE  what A is, the version of this connection, a random number
//	D -> A  PROOF      HMAC-SHA256(secret, label of the dialer, both bodies)
//	A -> D  WELCOME    HMAC-SHA256(secret, label of the acceptor, both bodies)
//	A -> D  REFUSE     at any point instead: code u16, text (u16 length)
//
// HELLO and CHALLENGE have the same layout; a later version may append to it:
//
//	 0     1     2     3   4         6       8        10    12               28              60
//	+-----+-----+-----+---+---------+-------+--------+-----+----------------+---------------+
//	|min  |max  |lane | 0 |from u16 |to u16 |logs u16| 0 0 |cluster 16 bytes|nonce 32 bytes |
//	+-----+-----+-----+---+---------+-------+--------+-----+----------------+---------------+
//
// The version is the lower of the two highest, if both speak it; a CHALLENGE has it as min and as max. The secret itself is
// never sent. The caller proves first, so that who merely connects learns nothing to guess the secret by; the random numbers
// make a recorded handshake worthless, the labels a proof that is sent back. Cluster id and number of logs are compared when
// both are proved; a node that belongs to no cluster yet fits any. The checksums of each direction begin with eight bytes
// that are derived like the proofs.
//
// The handshake proves who is at the other end. It does not encrypt, and it doesn't protect from somebody who can alter what
// two nodes that know the secret say: that takes a trusted network or a tunnel.
//
// # When something is wrong
//
// A frame that does not belong there ends its connection, and nothing of it reaches the handler. An end that says nothing
// for the idle time, not even the answer to a PING, is given up. Nothing of what arrives panics or is believed to be as long
// as it claims: memory grows with what has arrived.
package peer
