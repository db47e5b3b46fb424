// See module_program.h. Handles and arrays are kept alive by kernels/native_program.py.
#include "module_program.h"

#include "module_arrays.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace KVIST_NAMESPACE {

namespace {

// A program with the step that it runs next. The groups' list keeps its memory from step to step.
struct BoundProgram {
  explicit BoundProgram(Machine& machine) : program(machine), pass{} {}

  Program program;
  Pass pass;
  int64_t* times = nullptr;  // of each call, in nanoseconds
};

void begin(BoundProgram& self, Array<const int32_t, 1> token_ids, Array<const int32_t, 1> positions, Array<const int32_t, 1> query_start,
           Array<const int32_t, 1> taken) {
  const size_t rows = positions.shape(0);
  require(token_ids.shape(0) == rows && query_start.shape(0) > 0 && rows < (1u << 30), "program: the step's arrays do not match");
  StepBatch& batch = self.pass.step.batch;
  batch = {static_cast<int>(rows), static_cast<int>(query_start.shape(0)) - 1, positions.data(), query_start.data()};
  self.pass.step.groups.clear();
  self.pass.token_ids = token_ids.data();
  self.pass.taken = taken.data();
  self.pass.taken_rows = static_cast<int>(taken.shape(0));
}

void add_group(BoundProgram& self, Array<const int32_t, 2> block_table, Array<const int64_t, 1> slots) {
  const StepBatch& batch = self.pass.step.batch;
  require(block_table.shape(0) == static_cast<size_t>(batch.sequences) && slots.shape(0) == static_cast<size_t>(batch.rows),
          "program: a group's tables do not match the step");
  self.pass.step.groups.push_back({block_table.data(), slots.data(), static_cast<long>(block_table.shape(1))});
}

}  // namespace

void define_program(nb::module_& m) {
  using Norm = Array<const float, 1>;
  nb::class_<BoundProgram>(m, "Program")
      .def(nb::init<Machine&>(), "machine"_a, nb::keep_alive<1, 2>())
      .def("add_array", [](BoundProgram& self, long width, bool taken) { return self.program.add_array(width, taken); })
      .def("bind_array",
           [](BoundProgram& self, int array, Array<float, 2> memory) {
             self.program.bind_array(array, memory.data(), static_cast<long>(memory.shape(0)), static_cast<long>(memory.shape(1)));
           })
      .def("embed", [](BoundProgram& self, const Linear& table, int out) { self.program.embed(table, out); })
      .def("norm_linear",
           [](BoundProgram& self, int x, Norm norm, float eps, const Linear& weight, int out) {
             self.program.norm_linear(x, norm.data(), static_cast<long>(norm.shape(0)), eps, weight, out);
           })
      .def("linear_add", [](BoundProgram& self, int x, const Linear& weight, int residual) { self.program.linear_add(x, weight, residual); })
      .def("gated_mlp",
           [](BoundProgram& self, int x, Norm norm, float eps, const Linear& gate_up, const Linear& down) {
             self.program.gated_mlp(x, norm.data(), static_cast<long>(norm.shape(0)), eps, gate_up, down);
           })
      .def("rope_write", [](BoundProgram& self, const AttentionLayer& layer, int qkv) { self.program.rope_write(layer, qkv); })
      .def("attend", [](BoundProgram& self, const AttentionLayer& layer, int qkv, int out) { self.program.attend(layer, qkv, out); })
      .def("take", [](BoundProgram& self, int x, int out) { self.program.take(x, out); })
      .def("__len__", [](const BoundProgram& self) { return self.program.size(); })
      .def("begin", &begin, "token_ids"_a, "positions"_a, "query_start"_a, "taken"_a)
      .def("add_group", &add_group, "block_table"_a, "slots"_a)
      .def("run", [](BoundProgram& self) { self.program.run(self.pass); }, Release())
      .def("bind_times",
           [](BoundProgram& self, Array<int64_t, 1> times) {
             require(times.shape(0) == self.program.size(), "program: one time a call");
             self.times = times.data();
           })
      .def("run_timed",
           [](BoundProgram& self) {
             require(self.times != nullptr, "program: no place for times");
             self.program.run_timed(self.pass, self.times);
           }, Release());
}

}  // namespace KVIST_NAMESPACE
