// Package client is the broker's side of the client port: it accepts connections, takes their frames apart, hands the
// requests to the engine and sends the answers back in order. The public client library is the package client at the
// root of the module.
//
// # Goroutines
//
// A few event loops (gnet) own the connections; there is no goroutine per connection. Everything marked "loop" in this
// package runs on the loop that owns the connection. The methods of coord.Client are the only ones that other goroutines
// call; they touch what the connection's mutex guards, never the socket.
//
// gnet does the polling and the reading. Four things are done here instead, each for a reason:
//   - Accepting. gnet's acceptor ends the whole engine when the process is out of file descriptors, and it cannot stop
//     accepting while it goes on serving. Connections are accepted with package net and enrolled in the loops.
//   - Writing. gnet copies what a socket does not take into a buffer without a bound and tells nobody when it has left.
//     A connection has its own queue of bytes, written with writev on the loop; when the socket is full a second epoll
//     instance waits until it is writable again. gnet's own output buffer stays empty.
//   - Waking. Instead of one task per connection and flush, connections with something to write gather in a list per
//     loop, and one wake-up of the loop serves all of them.
//   - The end of a client's side. gnet closes a connection when it reads the end. A client may shut its side behind its
//     last request, though, and still wait for the answers: they leave through a duplicate of the descriptor, within
//     AnswerGrace, and then the connection closes.
//
// # Requests and answers
//
// Every request gets the next number of its connection. The answer to the oldest one goes straight to the queue of
// bytes; one that overtakes waits in a ring of slots, small frames inline, until its turn comes. Pushes (MSG, NOTICE) go
// to the queue at once; only the messages of a subscription whose SUB is not answered yet wait for that (early.go).
//
// # What a client does wrong
//
// A frame that breaks the protocol is answered, in its turn, with an ERR; the connection closes when that has left.
// Nothing behind it is read. Where the specification leaves a choice: OK, MSG and NOTICE, which only the broker sends,
// are answered 0x0003, or 0x0005 before CONNECT; an ERR is accepted at any time and only logged. A connection that is
// silent for the keepalive time, or whose frame stays incomplete for the half-frame time, closes without an ERR.
package client
