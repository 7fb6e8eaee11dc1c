# SPDX-License-Identifier: Apache-2.0
# One Spot VM with a GPU that an Auto Scaling group replaces when it is taken away, in whichever of several
# types and subnets has room.  The role may do what ../../permissions/aws-vm.json says, and no more.

terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.0"
    }
  }
}

variable "run" {
  type        = string
  description = "Name of the training run; two groups never share one."
}

variable "bucket" {
  type        = string
  description = "An existing bucket, best with versioning and a rule that aborts incomplete multipart uploads."
}

variable "prefix" {
  type        = string
  default     = "checkpoints"
  description = "Checkpoints go below it."
}

variable "subnets" {
  type        = list(string)
  description = "As many zones as possible: that is where spare GPUs are found."
}

variable "security_groups" {
  type        = list(string)
  default     = []
  description = "The VM needs no way in; out to S3, and to the Auto Scaling service."
}

variable "instance_types" {
  type        = list(string)
  default     = ["g5.xlarge", "g5.2xlarge", "g6.xlarge", "g6.2xlarge"]
  description = "Types that the run can go on with on any of them."
}

variable "image_name" {
  type        = string
  default     = "swansong"
  description = "As given to Packer; the newest image is taken."
}

locals {
  group = "swansong-${var.run}"
}

data "aws_ami" "swansong" {
  owners      = ["self"]
  most_recent = true

  filter {
    name   = "name"
    values = ["${var.image_name}-*"]
  }
}

resource "aws_iam_role" "vm" {
  name_prefix = "swansong-"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "vm" {
  name_prefix = "swansong-"
  role        = aws_iam_role.vm.id
  policy = replace(replace(replace(
    file("${path.module}/../../permissions/aws-vm.json"),
    "BUCKET", var.bucket),
    "PREFIX", var.prefix),
  "GROUP", local.group)
}

resource "aws_iam_instance_profile" "vm" {
  name_prefix = "swansong-"
  role        = aws_iam_role.vm.name
}

resource "aws_launch_template" "vm" {
  name_prefix            = "swansong-"
  image_id               = data.aws_ami.swansong.id
  vpc_security_group_ids = var.security_groups
  update_default_version = true

  iam_instance_profile {
    arn = aws_iam_instance_profile.vm.arn
  }

  # One hop: containers with a network of their own get neither notices nor the VM's credentials.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  user_data = base64encode(templatefile("${path.module}/../../first-boot/aws-user-data.yaml", {
    run   = var.run
    store = "s3://${var.bucket}/${var.prefix}"
    group = local.group
  }))
}

resource "aws_autoscaling_group" "vm" {
  name                      = local.group
  min_size                  = 1
  max_size                  = 1
  vpc_zone_identifier       = var.subnets
  wait_for_capacity_timeout = "0"

  # A replacement beside a VM that still trains would take the run over from it.
  capacity_rebalance = false

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = 0
      spot_allocation_strategy                 = "price-capacity-optimized"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.vm.id
        version            = aws_launch_template.vm.latest_version
      }

      dynamic "override" {
        for_each = var.instance_types
        content {
          instance_type = override.value
        }
      }
    }
  }

  # As sources.asg_hook and asg_grace_s in the user data: kept waiting until there is a verdict.
  initial_lifecycle_hook {
    name                 = "swansong"
    lifecycle_transition = "autoscaling:EC2_INSTANCE_TERMINATING"
    heartbeat_timeout    = 300
    default_result       = "CONTINUE"
  }

  tag {
    key                 = "Name"
    value               = local.group
    propagate_at_launch = true
  }
}
