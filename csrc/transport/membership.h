// Which rank of which group this is.
#pragma once

#include <string>

namespace pg_sdma {

struct Membership {
  std::string group;  // for messages
  int rank = 0;
  int world = 1;
};

}  // namespace pg_sdma
