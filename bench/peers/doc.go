// Package peers starts other message brokers on loopback and speaks their protocols, so that package bench can load them
// with the same generator as mortard:
//
//	redis      Redis Streams, appendfsync always and everysec      RESP2
//	nats       NATS JetStream, file store, 1 node and 3            NATS client protocol
//	nsq        nsqd with a disk queue                              NSQ protocol V2
//	rabbitmq   RabbitMQ quorum queues, 1 node and 3                AMQP 0-9-1
//
// The protocols are written out here, a few hundred lines each, instead of using the systems' client libraries: what a
// library costs in CPU time would count as the server's, for both share the machine, and mortard is loaded without one, too.
// Where a system leaves a choice, the one that serves it best is taken: acknowledgements of many messages in one request
// where the protocol has that, large prefetch windows, connections to the leader of a replicated queue, no rewriting of
// append-only files during a run.
//
// Nothing of this is needed to build or test MortarMQ: install.sh installs the servers, and what is missing is skipped.
package peers
