#include "transport/health/group_health.h"

#include <sstream>

#include "transport/health/messages.h"

namespace pg_sdma {

void GroupHealth::check_fault() const {
  if (!page_.faulted()) return;
  const std::string why = page_.fault();
  tell(why);
  throw GroupFault(why);
}

void GroupHealth::declare(const std::string& why) { page_.set_fault(self_.rank, why); }

void GroupHealth::fail(const std::string& why) {
  declare(why);
  check_fault();
  throw GroupFault(why);  // not reached: the fault is set, by this rank or before
}

// All of them, not only the one that is waited for: that one may be late for another reason.
void GroupHealth::check_peers(const Operation& operation, bool under_way) {
  const uint64_t number = operation.number;
  for (int rank = 0; rank < self_.world; ++rank) {
    const bool departed = page_.departed(rank);
    if (rank == self_.rank || (!departed && !peers_->gone(rank))) continue;
    // Read after its departure: what it did before that counts.
    const bool copies = copies_alone_ && !peers_->gone(rank);  // also once departed
    const bool needed =
        page_.consumed(rank) < number || (under_way && !copies && page_.done(rank) < number);
    if (!needed) continue;
    fail(messages::title(self_, operation) + " waits for rank " + std::to_string(rank) +
         (departed ? ", which has destroyed the group or is exiting (look at its output). "
                   : ", whose process has ended (look at its output for the cause). ") +
         tell_progress_of(operation));
  }
}

std::string GroupHealth::tell_progress_of(const Operation& operation) const {
  return tell_progress(progress(), operation.number, copies_alone_,
                       Clock::now() - operation.started);
}

std::string GroupHealth::timed_out(const Operation& operation, int rank, const char* what) const {
  std::ostringstream text;
  text << messages::title(self_, operation) << " timed out after " << operation.timeout.count()
       << " ms: rank " << rank << " " << what << ". " << tell_progress_of(operation)
       << " Look for that rank's error, or raise the group's timeout.";
  return text.str();
}

}  // namespace pg_sdma
