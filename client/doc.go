// Package client is the Go client library of MortarMQ.
package client
