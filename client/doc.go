// Package client is the Go client library of MortarMQ.
//
// # A short guide
//
// Dial connects to a broker, or to the nodes of a cluster. A topic is created once, by Declare, with its number of
// partitions; neither publishing nor subscribing creates one.
//
//	c, err := client.Dial(ctx, "10.0.0.1:7188,10.0.0.2:7188,10.0.0.3:7188", client.WithToken(token))
//	topic, err := c.Declare(ctx, "orders", client.DeclareOptions{Partitions: 12})
//
// A Producer publishes. Send waits for the answer; SendAsync and SendFunc do not, and are the way to publish much:
// thousands of messages are then on their way at once, in few system calls. An answer without error means that the
// message is stored as safely as was asked for, by default on a majority of the nodes.
//
//	p, err := c.NewProducer(ctx, "orders", client.ProducerOptions{})
//	result, err := p.Send(ctx, client.Record{Key: []byte("order-1"), Value: body})
//
// A Consumer is a member of a group. Members share the partitions, groups read independently of each other. Run calls a
// handler for each message: one at a time, or several on different partitions (Concurrency), or on different keys
// (ParallelKeys). An error or a panic of a handler has the message delivered again. Messages is a channel, for those who
// end messages by themselves with Ack and Nack.
//
//	k, err := c.NewConsumer(ctx, "orders", "billing", client.ConsumerOptions{Concurrency: 4})
//	err = k.Run(ctx, func(ctx context.Context, m *client.Message) error { return bill(m.Key, m.Value) })
//
// A message is delivered at least once. It comes again after an error of the handler, a crash, or an ACK that was lost;
// recognise such a message by a business key of its own or by topic, partition and Sequence.
//
// Close a Consumer and a Producer with their own Close to end in an orderly way, then the Client.
//
// # Errors
//
// A refusal of the broker is an *Error, matched by its code: errors.Is(err, client.ErrUnknownTopic), or any other code
// of package protocol. What arises in the library is matched the same way: ErrClosed, ErrDeliveryTimeout,
// ErrDeliveryEnded and so on; the end of a context is context.Canceled or context.DeadlineExceeded, with the last attempt's
// error beside it. Lost connections, moved leaders and refusals that ask for patience are dealt with inside and only show
// in the log (WithLogger), until a limit named in the options is reached.
//
// # Connections
//
// A Producer and a Consumer each have a connection of their own, the Client one for Declare, Lookup and the like that is
// closed after some idle seconds. When one breaks it is opened again:
//
//	        +-------------------------- node by node --------------------------+
//	        v                                                                  |
//	connecting --CONNECT OK--> serving --lost, silent, or 0x6005 (no leader)---+--all were tried--> pausing
//	    |   ^                                                                                          |
//	    |   +------------------------------------------------------------------------------------------+
//	    +---- no node takes the token or the version: the Producer or Consumer ends with that error
//
// Of the nodes that Dial was given each is tried once, beginning with the one that is said to lead: a node that does not
// lead names the leader in its refusal. Then there is a pause, of 500 ms, 1 s, 2 s ... 30 s plus some random time; while
// nodes answer but none leads yet, of 200 ms for two seconds, then up to 1 s. What a Producer had sent without an answer is
// sent again with the same sequences, and a Consumer rejoins as the member that it was, so a failover shows as latency only.
// When a leader refuses writes for want of a majority, or owes answers for 2.5 s, the other nodes are asked in the background whether one
// of them leads, and only if so is it left: if they are gone too, consumers still get from it what is committed.
//
// # How a Producer keeps order without losing or doubling messages
//
// Messages are encoded once into 64 KiB buffers, where they stay until they are answered. Each has a producer id and,
// per partition, the next producer_seq from 1; the broker drops what it has stored already. Answers come in the order of
// the requests. At most 1 024 messages per partition are unanswered, which is what the broker can recognise.
//
//	             +--- OK: done
//	in flight ---+--- lost connection: sent again first of all, in order, with the same sequence
//	             +--- retriable (0x4001, 0x4004, 0x6002, ...): held, with all of the partition behind it (0x0010); when
//	             |    all of the partition is answered, and after a pause, sent again in order
//	             +--- 0x0010 or 0x0011 although all earlier ones are answered: the broker forgot the producer; what is
//	             |    held is numbered from 1 under a new producer id
//	             +--- another refusal: failed; the ones behind it are numbered anew likewise
//
// # How a Consumer keeps its partitions and its credit
//
//	assigned (NOTICE ASSIGN, confirmed) --> revoking (NOTICE REVOKE) --> gone (confirmed)
//
// While revoking, nothing new of the partition is begun; it is confirmed when what had begun is ended and its ACKs are
// sent and ConsumerOptions.OnRevoke has returned, or after 4 s. OnAssign and OnRevoke let an application load and save
// what it keeps per partition: as long as nobody dies, one member is between the two at a time. A heartbeat goes out every
// 3 s. After a lost connection the member rejoins and keeps its partitions, or joins as a new one where it is too late for
// that; all deliveries of the old connection are over then.
//
// The broker sends while there is credit: each message costs 1 and the bytes of its key and value. The library returns
// the cost of every message that has ended, however it did, in batches of 32 messages, 1 MiB, half of the window or
// 20 ms, whichever is first. So the window bounds the memory of a Consumer. A broker that sends more is disconnected.
// With ConsumerOptions.Pull the broker sends only in answer to a PULL, of which one is always waiting.
//
// The lease of a message that waits or is worked on is renewed at a third of its time, up to MaxProcessing.
//
// # Memory
//
// Record's Key and Value are copied by the call. Message's Key and Value belong to the application. Nothing needs to be
// released.
package client
