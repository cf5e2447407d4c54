// The schedule of a reduce-scatter: slices land chunk by chunk and are summed as they come, beside
// the next copies where the engine is stream-ordered.
#pragma once

#include <list>

#include "transport/schedule/program_writer.h"

namespace pg_sdma {

// `call` and `launches` outlive the program. `on_streams`: else all ranks are ready before any of
// them begins.
Program sums(ProgramWriter& write, const Call& call, Reducer& reducer, bool on_streams,
             std::list<Launch>& launches);

}  // namespace pg_sdma
