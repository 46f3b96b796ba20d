package client

import (
	"fmt"
	"testing"
)

// exampleTB lets an example start a fake broker, which lives as long as the test process.
type exampleTB struct{ testing.TB }

func (exampleTB) Helper()                      {}
func (exampleTB) Cleanup(func())               {}
func (exampleTB) Fatal(args ...any)            { panic(fmt.Sprint(args...)) }
func (exampleTB) Errorf(f string, args ...any) { panic(fmt.Sprintf(f, args...)) }

// StartExampleBroker starts a broker for the examples and returns its address.
func StartExampleBroker() string { return newFakeBroker(exampleTB{}).addr() }
