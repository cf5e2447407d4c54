// The device engine on the stand-in, one check a run:
//
//   checks <driver> <name>     runs a check; fails by its exit status
//   checks <driver> refusal    prints why the engine refuses device 0
#include "checks.h"

using namespace standin_test;

int main(int argc, char** argv) {
  REQUIRE(argc == 3);
  driver_path = argv[1];
  if (std::string(argv[2]) == "refusal") {
    std::puts(refusal([] { engine_on(0); }).c_str());
    return 0;
  }
  all_checks().at(argv[2])();
  std::_Exit(0);  // a queue that waits for ever has a thread
}
