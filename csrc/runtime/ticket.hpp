// Windows that are read by a kernel which waits by itself: it polls what a ticket names (runtime/signals.hpp), so
// neither a wait nor a second launch of the reader lies between the rank's own rows and those of its peers.
#pragma once

#include "runtime/exchange.hpp"
#include "runtime/signals.hpp"

namespace fast_cp {

// What the ticket of an exchange says, and who must have begun it.
Reader reader_of(const Runtime& runtime, const OpenExchange& exchange);

// Puts the caller's stream behind the rank's own copies, where a reader may spin on all SMs, lets a wait watch the arrivals
// beside it, counts all chunks as waited for, and returns the ticket, which lies in device memory. Throws a sentence where
// the exchange has none, or a chunk has not been sent.
const Ticket* take_ticket(Runtime& runtime, OpenExchange& exchange);

}  // namespace fast_cp
