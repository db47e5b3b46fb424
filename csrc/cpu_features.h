// Which instruction sets this CPU (and its operating system) offers, for the choice of a build. Compiled for the plain CPU.
#pragma once

#include <string>
#include <vector>

std::vector<std::string> kvist_cpu_features();
