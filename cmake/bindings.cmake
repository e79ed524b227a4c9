# One extension module per .pyx; all of them link to the one libunimem in unimem/lib.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module NumPy)
find_program(CYTHON cython HINTS ${Python_EXECUTABLE}/.. REQUIRED)

set(UNIMEM_CYTHON_OPTIONS -3)
if(UNIMEM_COVERAGE)
  # gcov then counts the lines of the .pyx.
  list(APPEND UNIMEM_CYTHON_OPTIONS --line-directives)
endif()

file(GLOB UNIMEM_PXD CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/unimem/*/*.pxd)

# Builds the named modules of the package unimem.ROOM, which is the folder src/unimem/ROOM.
function(unimem_add_bindings room)
  foreach(module ${ARGN})
    set(source ${CMAKE_SOURCE_DIR}/src/unimem/${room}/${module}.pyx)
    set(c_file ${CMAKE_BINARY_DIR}/bindings/${room}/${module}.c)
    add_custom_command(
      OUTPUT ${c_file}
      COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/bindings/${room}
      COMMAND ${CYTHON} ${UNIMEM_CYTHON_OPTIONS} --module-name unimem.${room}.${module}
              -I ${CMAKE_SOURCE_DIR}/src ${source} --output-file ${c_file}
      DEPENDS ${source} ${UNIMEM_PXD}
      VERBATIM)
    set(target ${room}_${module})
    python_add_library(${target} MODULE ${c_file} WITH_SOABI)
    set_target_properties(${target} PROPERTIES
      OUTPUT_NAME ${module} LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bindings/${room}
      INSTALL_RPATH "$ORIGIN/../lib" BUILD_WITH_INSTALL_RPATH ON)
    target_compile_definitions(${target} PRIVATE NPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION
      NPY_TARGET_VERSION=NPY_2_0_API_VERSION)
    target_link_libraries(${target} PRIVATE unimem Python::NumPy)
    install(TARGETS ${target} DESTINATION unimem/${room})
  endforeach()
endfunction()

unimem_add_bindings(_core status arrays region mapping growth block tape grid header_bytes gguf
  safetensors load guard tmpfs empty_call)
unimem_add_bindings(kv arrays rows memory cache device paged scratchpad)
